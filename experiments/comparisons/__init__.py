"""Methods of several papers side by side."""

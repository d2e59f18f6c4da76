"""Comparisons of methods of several papers."""

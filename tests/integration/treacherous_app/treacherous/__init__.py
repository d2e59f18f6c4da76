"""An app whose clients' training fails by schedule."""

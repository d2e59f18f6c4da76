"""Audits of released packages: `python -m benchmarks.referee`."""

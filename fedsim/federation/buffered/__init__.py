"""Buffered asynchronous rounds: their schedule, and the sums of releases to come."""

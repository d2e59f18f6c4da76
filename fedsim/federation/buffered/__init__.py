"""Buffered asynchronous rounds: their schedule, the sums of releases to come, and real time."""

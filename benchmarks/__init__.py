"""What measures speed and memory; never a timed test."""

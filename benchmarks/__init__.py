"""Benchmarks of speed and memory; none of them is part of a test."""

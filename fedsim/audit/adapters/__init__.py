"""Targets from other packages' objects; each file needs that package and numpy, not fedsim."""

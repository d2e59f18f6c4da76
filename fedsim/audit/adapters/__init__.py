"""Targets made of other packages' objects; each file needs that package and numpy, not fedsim."""

"""Xu et al.: ADADP, the adaptive noise."""

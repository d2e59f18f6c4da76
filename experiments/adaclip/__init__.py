"""Pichapati et al.: AdaCliP."""

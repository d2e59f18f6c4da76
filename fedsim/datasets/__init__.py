"""Data sets: named ones and a user's own arrays, loaded once or mapped."""

from fedsim.datasets.dataset import Dataset, Split
from fedsim.datasets.load import load

__all__ = ["Dataset", "Split", "load"]

"""Data sets: named ones and a user's own arrays, loaded once or mapped."""

from fedsim.datasets.dataset import Dataset, Split
from fedsim.datasets.load import NAMES, load

__all__ = ["NAMES", "Dataset", "Split", "load"]

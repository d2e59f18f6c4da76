"""Data sets: named ones and a user's own arrays, as tensors that are loaded once."""

from fedsim.datasets.dataset import Dataset
from fedsim.datasets.load import NAMES, load

__all__ = ["NAMES", "Dataset", "load"]

"""Data sets: named ones and a user's own arrays and tables, loaded once or mapped."""

from fedsim.datasets.conversion import dataset_of, from_table
from fedsim.datasets.dataset import Dataset, Split
from fedsim.datasets.load import load

__all__ = ["Dataset", "Split", "dataset_of", "from_table", "load"]

"""Data sets: named ones and a user's own arrays and tables, loaded or memory-mapped."""

from fedsim.arguments import explain_calls
from fedsim.datasets.dataset import Dataset, Split
from fedsim.datasets.load import dataset_of, from_table, load
from fedsim.named_tensors import NamedTensors

__all__ = ["Dataset", "NamedTensors", "Split", "dataset_of", "from_table", "load"]

explain_calls(__name__)

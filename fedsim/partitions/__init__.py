"""Partitioners: which training example belongs to which client.

A partitioner is a frozen dataclass; its ``indices(targets, columns)`` gives one sorted int64 array
of positions for each client, disjoint and together all of them, as a function of the targets, the
columns and its ``seed`` alone.
"""

from fedsim.partitions.base import Columns, Examples, Indices, Partition, subsample
from fedsim.partitions.by_owner import ByOwner
from fedsim.partitions.dirichlet import Dirichlet
from fedsim.partitions.holdout import hold_out
from fedsim.partitions.iid import IID
from fedsim.partitions.interpolated_pathological import (
    CIFAR10_PAIRS,
    InterpolatedPathological,
    parse_groups,
)
from fedsim.partitions.shards import Shards

__all__ = [
    "CIFAR10_PAIRS",
    "IID",
    "ByOwner",
    "Columns",
    "Dirichlet",
    "Examples",
    "Indices",
    "InterpolatedPathological",
    "Partition",
    "Shards",
    "hold_out",
    "parse_groups",
    "subsample",
]

"""Partitioners: which training example belongs to which client.

A partitioner is a frozen dataclass; its ``indices(labels)`` gives one sorted int64 array of
positions for each client, disjoint and together all of them, as a function of the labels and
its ``seed`` alone.
"""

from fedsim.partitions.base import Indices, Partition, subsample
from fedsim.partitions.dirichlet import Dirichlet
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
    "Dirichlet",
    "Indices",
    "InterpolatedPathological",
    "Partition",
    "Shards",
    "parse_groups",
    "subsample",
]

"""Partitioners: which training example belongs to which client.

A partitioner is a frozen dataclass; its ``indices(targets, columns)`` gives one sorted int64 array
of positions for each client, disjoint and together all of them, as a function of the targets, the
columns and its ``seed`` alone.
"""

from fedsim.arguments import explain_calls
from fedsim.partitions.base import Columns, Examples, Partition, hold_out, subsample
from fedsim.partitions.by_owner import ByOwner
from fedsim.partitions.published import (
    CIFAR10_PAIRS,
    IID,
    Dirichlet,
    InterpolatedPathological,
    Shards,
    parse_groups,
)

__all__ = [
    "CIFAR10_PAIRS",
    "IID",
    "ByOwner",
    "Columns",
    "Dirichlet",
    "Examples",
    "InterpolatedPathological",
    "Partition",
    "Shards",
    "hold_out",
    "parse_groups",
    "subsample",
]

explain_calls(__name__)

"""Where clients run, and how many at a time: Flower Grids, and launchers for its runtimes."""

from __future__ import annotations

from fedsim.engines.arrays import LazyArray, array_record, tensors
from fedsim.engines.directory import ClientDirectory, client_ids
from fedsim.engines.local import LocalGrid
from fedsim.engines.ray import RayGrid
from fedsim.engines.streaming import StreamingGrid

__all__ = [
    "ClientDirectory",
    "LazyArray",
    "LocalGrid",
    "RayGrid",
    "StreamingGrid",
    "array_record",
    "client_ids",
    "tensors",
]

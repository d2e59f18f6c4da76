"""Engines that run clients: Flower Grids for local, Ray and streaming execution."""

from __future__ import annotations

from fedsim.arguments import explain_calls
from fedsim.federation.arrays import LazyArray, array_record, tensors
from fedsim.federation.engines.client_app import hold_answers
from fedsim.federation.engines.directory import ClientDirectory, client_ids
from fedsim.federation.engines.local import LocalGrid
from fedsim.federation.engines.ray import RayGrid
from fedsim.federation.engines.streaming import StreamingGrid

__all__ = [
    "ClientDirectory",
    "LazyArray",
    "LocalGrid",
    "RayGrid",
    "StreamingGrid",
    "array_record",
    "client_ids",
    "hold_answers",
    "tensors",
]

explain_calls(__name__)

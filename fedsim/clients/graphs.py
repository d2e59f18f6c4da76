"""The stacked path on a GPU, captured: one launch for a step instead of dozens.

A block's gradient is a fixed sequence of kernels for given shapes, so it is captured in a CUDA
graph the first time a shape is met and replayed from then on. Where a capture fails (an
older driver, an operation that may not be captured) the path goes on without one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedsim.clients.gradients import Factor, Factored
from fedsim.clients.stacked import StackedPath

__all__ = ["GraphedPath"]

_log = logging.getLogger(__name__)
WARM_UP = 3


@dataclass(frozen=True)
class _Captured:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    gradient: Factored
    losses: Tensor


@dataclass
class GraphedPath:
    """`StackedPath` by CUDA graphs, one for each shape of a block.

    Parameters
    ----------
    path : StackedPath
        On a CUDA device.
    """

    path: StackedPath
    name: str = "stacked"
    _captured: dict[tuple[torch.Size, ...], _Captured] = field(default_factory=dict)
    _works: bool = True

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Factored, Tensor]:
        """As `StackedPath.gradient`."""
        inputs = (theta, x, y, weight)
        key = tuple(tensor.shape for tensor in inputs)
        if self._works and key not in self._captured:
            try:
                self._captured[key] = self._capture(inputs)
            except RuntimeError as error:
                _log.warning("a CUDA graph could not be captured (%s); going on without", error)
                self._works = False
        if not self._works:
            return self.path.gradient(theta, x, y, weight)
        captured = self._captured[key]
        for own, given in zip(captured.inputs, inputs, strict=True):
            own.copy_(given)
        captured.graph.replay()
        # Copies, as the next replay writes over them and an algorithm may keep a gradient.
        factors = [
            Factor(f.x.clone(), f.delta.clone(), f.weight, f.bias)
            for f in captured.gradient.factors
        ]
        return Factored(factors, captured.gradient.packing), captured.losses.clone()

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """As `StackedPath.outputs`."""
        return self.path.outputs(theta, x)

    def _capture(self, inputs: tuple[Tensor, ...]) -> _Captured:
        own = tuple(tensor.clone() for tensor in inputs)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.path.gradient(*own)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gradient, losses = self.path.gradient(*own)
        return _Captured(graph, own, gradient, losses)

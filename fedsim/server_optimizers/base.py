"""What the server does with the noisy mean update: post-processing, free of privacy cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fedsim.lazy import Tensor

__all__ = ["ServerOptimizer"]


class ServerOptimizer(Protocol):
    """Moves the global parameters along an update.

    A class that inherits from this one has `state` and `restore` of an optimiser that keeps
    nothing between rounds.
    """

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters from ``vector [d]`` and the mean ``update [d]``; neither is changed."""

    def state(self) -> Mapping[str, Any]:
        """What it keeps between rounds: tensors and what JSON can say, by name."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        del state

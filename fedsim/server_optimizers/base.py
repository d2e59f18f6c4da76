"""What the server does with the noisy mean update: post-processing, free of privacy cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fedsim.lazy import Tensor
from fedsim.settings import check_settings


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
        """Resume what `state` gave."""


class StatefulOptimizer(ServerOptimizer):
    """An optimiser with settings that keeps tensors between rounds, by their names."""

    def __post_init__(self) -> None:
        check_settings(self, "server.")
        self.tensors: dict[str, Tensor] = {}

    def moment(self, name: str, vector: Tensor) -> Tensor:
        """The vector of this name after the last step, like ``vector``; zero before the first."""
        slot = self.tensors.get(name)
        return vector.new_zeros(vector.shape) if slot is None else slot.to(vector)

    def state(self) -> dict[str, Tensor]:
        """The tensors, once there are any."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume what `state` gave."""
        self.tensors = {name: tensor.clone() for name, tensor in state.items()}

"""Base classes of server optimisers, and of what follows their step.

They apply the noisy mean update, which is post-processing and has no privacy cost. What a step
returns is the released model. An optimiser that releases something else than it steps, such as an
average of its iterates, keeps its iterate in its state, and sends it to the clients.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

from fedsim.lazy import Tensor, torch
from fedsim.settings import check_settings


class ServerOptimizer(Protocol):
    """Applies a mean update to the global parameters.

    The default `state` and `restore` are those of an optimiser without state between rounds, and
    clients train by default from the released parameters.
    """

    def starting_point(self, vector: Tensor) -> Tensor:
        """Parameters ``[d]`` from which clients train, given the released ``vector [d]``."""
        return vector

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """Parameters to release, given the mean ``update [d]`` of clients that began at ``vector``.

        Neither is changed.
        """

    def state(self) -> Mapping[str, Any]:
        """State to keep between rounds, by name: tensors and JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""


class StatefulOptimizer(ServerOptimizer):
    """An optimiser with settings, whose state is tensors by name."""

    def __post_init__(self) -> None:
        check_settings(self, "server.")
        self.tensors: dict[str, Tensor] = {}

    def moment(self, name: str, vector: Tensor) -> Tensor:
        """State tensor of this name, in dtype and on the device of ``vector``; zero at first."""
        slot = self.tensors.get(name)
        return vector.new_zeros(vector.shape) if slot is None else slot.to(vector)

    def state(self) -> dict[str, Tensor]:
        """Copies of the state tensors; empty before the first step."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.tensors = {name: tensor.clone() for name, tensor in state.items()}

    def after_a_step(self, d: int) -> dict[str, Tensor]:
        """Tensors, without data, that are kept after a first step of ``d`` parameters."""
        fresh = copy.copy(self)
        fresh.tensors = {}
        fresh.step(torch.zeros(d, device="meta"), torch.zeros(d, device="meta"))
        return fresh.tensors

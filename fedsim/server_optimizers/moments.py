"""What server optimisers have in common that keep vectors between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedsim.lazy import torch
from fedsim.server_optimizers.base import ServerOptimizer
from fedsim.settings import check_settings

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WithMoments"]


@dataclass
class WithMoments(ServerOptimizer):
    """An optimiser whose state is a number of steps and a vector ``[d]`` for each of some names."""

    steps: int = field(default=0, init=False, repr=False)
    moments: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self, "server.")

    def moment(self, name: str, vector: Tensor) -> Tensor:
        """The vector of this name as of the last step, like ``vector``; zero before the first."""
        kept = self.moments.get(name)
        return torch.zeros_like(vector) if kept is None else kept.to(vector)

    def state(self) -> dict[str, Any]:
        """``steps`` and the vectors by their names, once there are any."""
        if not self.steps:
            return {}
        return {"steps": self.steps, **{k: moment.clone() for k, moment in self.moments.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.steps = state["steps"] if state else 0
        self.moments = {k: kept.clone() for k, kept in state.items() if k != "steps"}

"""A server optimiser whose rate follows a schedule."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedsim.clients.base import Step
from fedsim.clients.schedules import Schedule
from fedsim.errors import FedsimError
from fedsim.server_optimizers import ServerOptimizer

__all__ = ["Scheduled"]


@dataclass
class Scheduled(ServerOptimizer):
    """``optimizer`` with its ``lr`` multiplied by ``schedule``, release by release.

    Parameters
    ----------
    optimizer : ServerOptimizer
        With an ``lr``.
    schedule : Schedule
        Of rounds; a round without a release does not count.
    """

    optimizer: Any
    schedule: Schedule
    releases: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.optimizer, "lr"):
            raise FedsimError(
                f"server.schedule is '{self.schedule}', but {self.optimizer} (server.optimizer) "
                "has no lr for it to multiply."
            )
        if self.schedule.over != "round":
            raise FedsimError(
                f"server.schedule is '{self.schedule}'; a server has rounds and no local steps, so "
                "it must be over=round."
            )
        # A copy: its rate is changed from step to step, and the given one's is not.
        self._rate, self._stepping = self.optimizer.lr, copy.deepcopy(self.optimizer)
        self._set_rate(self._rate)

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]`` by a step at this release's rate."""
        self.releases += 1
        self._set_rate(self._rate * self.schedule(Step(round=self.releases, index=0)))
        moved: Tensor = self._stepping.step(vector, update)
        return moved

    def _set_rate(self, rate: float) -> None:
        try:
            # Not by its own way of setting, which in a frozen dataclass refuses everything.
            object.__setattr__(self._stepping, "lr", rate)
        except AttributeError as error:
            raise FedsimError(
                f"server.schedule is '{self.schedule}', but the lr of {self.optimizer} "
                "(server.optimizer) cannot be set; it must be an attribute."
            ) from error

    def state(self) -> dict[str, Any]:
        """That of the optimiser inside, and ``releases``."""
        return {**self._stepping.state(), "releases": self.releases} if self.releases else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.releases = state["releases"] if state else 0
        self._stepping.restore({k: v for k, v in state.items() if k != "releases"})

"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm, State, Step, check_range
from fedsim.clients.gradients import Gradient
from fedsim.clients.schedules import Schedule

__all__ = ["SGD"]


@dataclass(frozen=True)
class SGD(LocalAlgorithm):
    """``v <- momentum v + g + weight_decay theta;  theta <- theta - lr v``, as in PyTorch.

    With a batch size of 0 (all of a client's examples) these are the full local gradient steps
    of Das et al. 2021.

    Parameters
    ----------
    lr : float
    momentum : float
    weight_decay : float
    schedule : Schedule
        What ``lr`` is multiplied by.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)

    carried: ClassVar[tuple[str, ...]] = ("velocity",)

    def __post_init__(self) -> None:
        check_range("lr", self.lr, low=0)
        check_range("momentum", self.momentum, low=0, below=1)
        check_range("weight-decay", self.weight_decay, low=0)

    def numbers(self) -> dict[str, float]:
        """The rate."""
        return {"lr": self.lr}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Velocity zero, where there is momentum."""
        state = super().init(theta, numbers)
        if self.momentum:
            state["velocity"] = torch.zeros_like(theta)
        return state

    def phase(self, at: Step) -> Hashable:
        """All steps are alike."""
        return "step"

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """One step."""
        theta, rate = state["theta"], state["lr"] * at.number(self.schedule)
        if not self.momentum and not self.weight_decay:
            gradient.subtract_from(theta, rate)
            return
        g = gradient.dense()
        if self.weight_decay:
            g.add_(theta, alpha=self.weight_decay)
        if self.momentum:
            g = state["velocity"].mul_(self.momentum).add_(g)
        theta.addcmul_(g, rate.unsqueeze(1), value=-1)

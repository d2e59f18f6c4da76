"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.clients.gradients import Gradient
from fedsim.clients.local import LocalAlgorithm, State, Step
from fedsim.errors import FedsimError

__all__ = ["SGD"]


@dataclass(frozen=True)
class SGD(LocalAlgorithm):
    """``v <- momentum v + g + weight_decay theta;  theta <- theta - lr v``, as in PyTorch.

    Parameters
    ----------
    lr : float
    momentum : float
    weight_decay : float
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    carried: ClassVar[tuple[str, ...]] = ("velocity",)

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise FedsimError(f"client.lr is {self.lr}; it must be zero or positive.")
        if not 0 <= self.momentum < 1:
            raise FedsimError(f"client.momentum is {self.momentum}; it must lie in [0, 1).")

    def numbers(self) -> dict[str, float]:
        """The rate."""
        return {"lr": self.lr}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Velocity zero, where there is momentum."""
        state = super().init(theta, numbers)
        if self.momentum:
            state["velocity"] = torch.zeros_like(theta)
        return state

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """One step."""
        theta, lr = state["theta"], state["lr"]
        if not self.momentum and not self.weight_decay:
            gradient.subtract_from(theta, lr)
            return
        g = gradient.dense()
        if self.weight_decay:
            g.add_(theta, alpha=self.weight_decay)
        if self.momentum:
            g = state["velocity"].mul_(self.momentum).add_(g)
        theta.addcmul_(g, lr.unsqueeze(1), value=-1)

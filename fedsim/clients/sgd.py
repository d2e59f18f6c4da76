"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.clients.base import (
    Gradient,
    LearningRate,
    LocalAlgorithm,
    State,
    Step,
    WeightDecay,
)
from fedsim.clients.schedules import CONSTANT, LocalSchedule
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Ge, Lt


@register("client", "sgd")
@dataclass(frozen=True)
class SGD(LocalAlgorithm):
    """``v <- momentum v + g + weight_decay theta;  theta <- theta - lr v``, as in PyTorch.

    With a batch size of 0 (all of a client's examples) these are the full local gradient steps
    of Das et al. 2021.
    """

    lr: LearningRate = 0.1
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Momentum: the share of the last step that the next one repeats."""
    weight_decay: WeightDecay = 0.0
    schedule: LocalSchedule = CONSTANT

    carried: ClassVar[tuple[str, ...]] = ("velocity",)

    def numbers(self) -> dict[str, float]:
        """The learning rate."""
        return {"lr": self.lr}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Initial state; with momentum, the velocity starts at zero."""
        state = super().init(theta, numbers)
        if self.momentum:
            state["velocity"] = torch.zeros_like(theta)
        return state

    def phase(self, at: Step) -> Hashable:
        """One key for all steps."""
        return "step"

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Make a step."""
        theta, rate = state["theta"], state["lr"]
        if self.schedule.shape != "constant":
            rate = rate * at.number(self.schedule)
        if not self.momentum and not self.weight_decay:
            gradient.subtract_from(theta, rate)
            return
        g = gradient.dense()
        if self.weight_decay:
            g.add_(theta, alpha=self.weight_decay)
        if self.momentum:
            g = state["velocity"].mul_(self.momentum).add_(g)
        theta.addcmul_(g, rate.unsqueeze(1), value=-1)

    def add_distance(self, state: State, slope: Tensor | float, rate: Tensor | float) -> None:
        """Add to ``moved`` the distance of this step, at ``rate``, for a gradient of ``slope``.

        `FedNova` and `Scaffold` normalise by it; their states have ``moved`` and ``speed``.
        """
        state["speed"] = self.momentum * state["speed"] + slope
        state["moved"] = state["moved"] + state["speed"] * rate

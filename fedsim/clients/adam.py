"""Adam as a local optimiser."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.clients.base import (
    Gradient,
    LearningRate,
    LocalAlgorithm,
    RootEpsilon,
    State,
    Step,
    WeightDecay,
)
from fedsim.clients.schedules import CONSTANT, LocalSchedule
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.rows.packing import powers_of
from fedsim.settings import Ge, Lt


@register("client", "adam")
@dataclass(frozen=True)
class Adam(LocalAlgorithm):
    """Adam (Kingma and Ba 2015), with PyTorch's defaults."""

    lr: LearningRate = 1e-3
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay rate of the moving average of gradients."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay rate of the moving average of squares."""
    eps: RootEpsilon = 1e-8
    weight_decay: WeightDecay = 0.0
    schedule: LocalSchedule = CONSTANT

    carried: ClassVar[tuple[str, ...]] = ("first", "second", "count")

    def numbers(self) -> dict[str, float]:
        """The learning rate."""
        return {"lr": self.lr}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Initial state, with moments of zero."""
        return {
            **super().init(theta, numbers),
            "first": torch.zeros_like(theta),
            "second": torch.zeros_like(theta),
            "count": theta.new_zeros(len(theta)),
        }

    def phase(self, at: Step) -> Hashable:
        """One key for all steps."""
        return "step"

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Make a step."""
        theta, g = state["theta"], gradient.dense()
        if self.weight_decay:
            g.add_(theta, alpha=self.weight_decay)
        count = state["count"].add_(1)
        first = state["first"].mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        second = state["second"].mul_(self.beta2).add_(g.square_(), alpha=1 - self.beta2)
        rate = state["lr"] * at.number(self.schedule) / (1 - powers_of(self.beta1, count))
        correction = (1 - powers_of(self.beta2, count)).sqrt().unsqueeze(1)
        root = second.sqrt().div_(correction).add_(self.eps)
        theta.sub_(root.reciprocal_().mul_(first).mul_(rate.unsqueeze(1)))

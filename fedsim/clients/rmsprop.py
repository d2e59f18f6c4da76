"""RMSProp, and its variant that Xu et al. 2020 use as local optimiser."""

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
from fedsim.settings import Ge, Gt, Lt


@register("client", "rmsprop")
@dataclass(frozen=True)
class RMSProp(LocalAlgorithm):
    """``E <- decay E + (1 - decay) g^2;  theta <- theta - lr g / (sqrt(E) + eps)``, as PyTorch."""

    lr: LearningRate = 1e-2
    decay: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Decay rate of the moving average of squares."""
    eps: RootEpsilon = 1e-8
    weight_decay: WeightDecay = 0.0
    schedule: LocalSchedule = CONSTANT

    carried: ClassVar[tuple[str, ...]] = ("second",)

    def numbers(self) -> dict[str, float]:
        """The learning rate."""
        return {"lr": self.lr}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Initial state, with a mean of squares of zero."""
        return {**super().init(theta, numbers), "second": torch.zeros_like(theta)}

    def phase(self, at: Step) -> Hashable:
        """One key for all steps."""
        return "step"

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Make a step."""
        theta, g = state["theta"], gradient.dense()
        if self.weight_decay:
            g.add_(theta, alpha=self.weight_decay)
        second = state["second"].mul_(self.decay).add_(g.square(), alpha=1 - self.decay)
        theta.sub_(
            g.div_(self._root(second)).mul_((state["lr"] * at.number(self.schedule)).unsqueeze(1))
        )

    def _root(self, second: Tensor) -> Tensor:
        return second.sqrt().add_(self.eps)


@register("client", "adadp-noise")
@dataclass(frozen=True)
class AdadpNoise(RMSProp):
    """The local optimiser of Xu et al. 2020: RMSProp with ``eps`` inside the root.

    Their method combines it with gradients privatised by `fedsim.mechanisms.AdaptiveNoise`: pass
    that mechanism to `ExamplePrivacy`. ``decay`` is one minus their gamma, the weight of the new
    term; they do not report the value they used.
    """

    decay: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay rate of the moving average of squares: 1 - gamma in the paper."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """A small number added under the root."""

    def _root(self, second: Tensor) -> Tensor:
        return second.add(self.eps).sqrt_()

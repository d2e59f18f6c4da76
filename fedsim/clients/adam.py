"""Local optimisers with a second moment: Adam, RMSProp, and Xu's."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm, State, Step, check_range
from fedsim.clients.gradients import Gradient
from fedsim.clients.schedules import Schedule

__all__ = ["AdadpNoise", "Adam", "RMSProp"]


@dataclass(frozen=True)
class Adam(LocalAlgorithm):
    """Adam (Kingma and Ba 2015), with PyTorch's defaults.

    Parameters
    ----------
    lr, beta1, beta2, eps, weight_decay : float
    schedule : Schedule
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)

    carried: ClassVar[tuple[str, ...]] = ("first", "second", "count")

    def __post_init__(self) -> None:
        check_range("lr", self.lr, low=0)
        check_range("beta1", self.beta1, low=0, below=1)
        check_range("beta2", self.beta2, low=0, below=1)
        check_range("eps", self.eps, above=0)
        check_range("weight-decay", self.weight_decay, low=0)

    def numbers(self) -> dict[str, float]:
        """The rate."""
        return {"lr": self.lr}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Moments zero."""
        return {
            **super().init(theta, numbers),
            "first": torch.zeros_like(theta),
            "second": torch.zeros_like(theta),
            "count": theta.new_zeros(len(theta)),
        }

    def phase(self, at: Step) -> Hashable:
        """All steps are alike."""
        return "step"

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """One step."""
        theta, g = state["theta"], gradient.dense()
        if self.weight_decay:
            g.add_(theta, alpha=self.weight_decay)
        count = state["count"].add_(1)
        first = state["first"].mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        second = state["second"].mul_(self.beta2).add_(g.square_(), alpha=1 - self.beta2)
        rate = state["lr"] * at.number(self.schedule) / (1 - self.beta1**count)
        root = second.sqrt().div_((1 - self.beta2**count).sqrt().unsqueeze(1)).add_(self.eps)
        theta.sub_(root.reciprocal_().mul_(first).mul_(rate.unsqueeze(1)))


@dataclass(frozen=True)
class RMSProp(LocalAlgorithm):
    """``E <- decay E + (1 - decay) g^2;  theta <- theta - lr g / (sqrt(E) + eps)``, as PyTorch.

    Parameters
    ----------
    lr, decay, eps, weight_decay : float
    schedule : Schedule
    """

    lr: float = 1e-2
    decay: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)

    carried: ClassVar[tuple[str, ...]] = ("second",)

    def __post_init__(self) -> None:
        check_range("lr", self.lr, low=0)
        check_range("decay", self.decay, low=0, below=1)
        check_range("eps", self.eps, above=0)
        check_range("weight-decay", self.weight_decay, low=0)

    def numbers(self) -> dict[str, float]:
        """The rate."""
        return {"lr": self.lr}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Second moment zero."""
        return {**super().init(theta, numbers), "second": torch.zeros_like(theta)}

    def phase(self, at: Step) -> Hashable:
        """All steps are alike."""
        return "step"

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """One step."""
        theta, g = state["theta"], gradient.dense()
        if self.weight_decay:
            g.add_(theta, alpha=self.weight_decay)
        second = state["second"].mul_(self.decay).add_(g.square(), alpha=1 - self.decay)
        theta.sub_(
            g.div_(self._root(second)).mul_((state["lr"] * at.number(self.schedule)).unsqueeze(1))
        )

    def _root(self, second: Tensor) -> Tensor:
        return second.sqrt().add_(self.eps)


@dataclass(frozen=True)
class AdadpNoise(RMSProp):
    """The local optimiser of Xu et al. 2020: RMSProp with ``eps`` inside the root.

    Their method is this on gradients privatised by `fedsim.mechanisms.AdaptiveNoise`: give
    that mechanism to `ExamplePrivacy`. ``decay`` is one minus their gamma, the weight of the
    new term; they do not say which value they used.

    Parameters
    ----------
    lr, decay, eps, weight_decay : float
    schedule : Schedule
    """

    decay: float = 0.9

    def _root(self, second: Tensor) -> Tensor:
        return second.add(self.eps).sqrt_()

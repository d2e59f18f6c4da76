"""Ditto: each client also trains a personal model, which is pulled towards the global one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.clients.base import DenseGradient, Gradient, LocalAlgorithm, State, Step
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Ge, Gt


@register("client", "ditto")
@dataclass(frozen=True)
class Ditto(LocalAlgorithm):
    """``theta <- theta - lr g(theta);  v <- v - own_lr (g(v) + pull (v - w_global))``.

    Gradient evaluations alternate between the two models, beginning with the global one: each gets
    half of a client's E steps. A client sends the update of theta, stores its own model v between
    rounds, and evaluates v (``client.state = "client"``). Source: Li et al. 2021, Algorithm 1.
    """

    lr: Annotated[float, Gt(0)] = 0.1
    """The learning rate of the shared model, which clients send."""
    own_lr: Annotated[float, Gt(0)] = 0.1
    """The learning rate of the client's own model."""
    pull: Annotated[float, Ge(0)] = 0.1
    """lambda: how strongly the client's own model is pulled towards the global one."""

    carried: ClassVar[tuple[str, ...]] = ("own",)
    evaluates: ClassVar[str] = "own"

    def numbers(self) -> dict[str, float]:
        """Both learning rates, and the strength of the pull."""
        return {"lr": self.lr, "own_lr": self.own_lr, "pull": self.pull}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Initial state; a client's own model starts from the first global model that it gets."""
        return {
            **super().init(theta, numbers),
            "global": theta.clone(),
            "own": theta.clone(),
            "is_own": torch.zeros(len(theta), 1, dtype=torch.bool, device=theta.device),
        }

    def point(self, state: State) -> Tensor:
        """The model that the next step trains."""
        return torch.where(state["is_own"], state["own"], state["theta"])

    def phase(self, at: Step) -> Hashable:
        """0 for a step of the global model, 1 for one of the client's own."""
        return at.index % 2

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Make a step of the global model at even steps, and of the client's own at odd ones."""
        if at.index % 2:
            pulled = (state["own"] - state["global"]).mul_(state["pull"].unsqueeze(1))
            step = DenseGradient(pulled.add_(gradient.dense()))
            step.subtract_from(state["own"], state["own_lr"])
        else:
            gradient.subtract_from(state["theta"], state["lr"])
        state["is_own"] = ~state["is_own"]

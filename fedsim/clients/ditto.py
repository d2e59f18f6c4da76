"""Ditto: beside the global model, each client trains one of its own that stays near to it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.clients.base import Dense, Gradient, LocalAlgorithm, State, Step
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Doc, Ge, Gt


@register("client", "ditto")
@dataclass(frozen=True)
class Ditto(LocalAlgorithm):
    """``theta <- theta - lr g(theta);  v <- v - own_lr (g(v) + pull (v - w_global))``.

    Gradient evaluations take turns, the first is the global model's: a client with E steps makes
    half of them with either. It sends the update of theta, keeps v, and evaluates with it
    (``client.state = "client"``). Source: Li et al. 2021, Algorithm 1.
    """

    lr: Annotated[float, Gt(0), Doc("The rate of a step of the model that is sent.")] = 0.1
    own_lr: Annotated[float, Gt(0), Doc("The rate of a step of the client's own model.")] = 0.1
    pull: Annotated[float, Ge(0), Doc("How strongly that is pulled to the global one.")] = 0.1

    carried: ClassVar[tuple[str, ...]] = ("own",)
    evaluates: ClassVar[str] = "own"

    def numbers(self) -> dict[str, float]:
        """Both rates, and the pull."""
        return {"lr": self.lr, "own_lr": self.own_lr, "pull": self.pull}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Its own model starts as the global one that it first sees."""
        return {
            **super().init(theta, numbers),
            "global": theta.clone(),
            "own": theta.clone(),
            "is_own": torch.zeros(len(theta), 1, dtype=torch.bool, device=theta.device),
        }

    def point(self, state: State) -> Tensor:
        """Whichever model has its turn."""
        return torch.where(state["is_own"], state["own"], state["theta"])

    def phase(self, at: Step) -> Hashable:
        """By whose turn it is."""
        return at.index % 2

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """One step of the model that has its turn."""
        if at.index % 2:
            pulled = (state["own"] - state["global"]).mul_(state["pull"].unsqueeze(1))
            step = Dense(pulled.add_(gradient.dense()))
            step.subtract_from(state["own"], state["own_lr"])
        else:
            gradient.subtract_from(state["theta"], state["lr"])
        state["is_own"] = ~state["is_own"]

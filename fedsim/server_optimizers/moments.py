"""What server optimisers have in common that keep vectors between rounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fedsim.lazy import Tensor, torch
from fedsim.server_optimizers.base import ServerOptimizer
from fedsim.settings import Doc, Ge, Gt, Lt, check_settings

__all__ = ["FirstOverRoot", "WithMoments", "adagrad_step"]


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


@dataclass
class FirstOverRoot(WithMoments):
    """Steps along a mean of the updates, over the root of one of their squares (Reddi et al. 2021).

    A subclass says what mean of squares that is, and may correct the rate.
    """

    lr: Annotated[float, Gt(0), Doc("eta, the rate.")] = 0.1
    beta1: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of updates.")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of their squares.")] = 0.99
    tau: Annotated[float, Gt(0), Doc("Added to the root: how adaptive steps are.")] = 1e-3

    @abstractmethod
    def squares(self, second: Tensor, update: Tensor) -> Tensor:
        """The new mean of squares ``[d]``, from that until now and an update."""

    @property
    def rate(self) -> float:
        """Of the step that is taken."""
        return self.lr

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        update = update.to(vector.dtype)
        self.steps += 1
        first = self.moment("first", vector).lerp(update, 1 - self.beta1)
        second = self.squares(self.moment("second", vector), update)
        self.moments = {"first": first, "second": second}
        return vector.addcdiv(first, second.sqrt().add_(self.tau), value=self.rate)


def adagrad_step(
    optimizer: WithMoments, vector: Tensor, update: Tensor, lr: float, added: float
) -> Tensor:
    """New parameters ``[d]``: along the update, over the root of all squares so far."""
    update = update.to(vector.dtype)
    optimizer.steps += 1
    second = optimizer.moment("second", vector).addcmul(update, update)
    optimizer.moments = {"second": second}
    return vector.addcdiv(update, second.sqrt().add_(added), value=lr)

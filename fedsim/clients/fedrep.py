"""FedRep: a client fits its own head to the shared body first, and then the body to its head."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.clients.base import PERSONAL_MASK, Dense, Gradient, LocalAlgorithm, State, Step
from fedsim.clients.schedules import CONSTANT, LocalSchedule
from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.settings import Doc, Ge, Gt


@register("client", "fedrep")
@dataclass(frozen=True)
class FedRep(LocalAlgorithm):
    """``h <- h - head_lr g_h`` in the first steps of a round, then ``b <- b - lr g_b``.

    The head h is what ``model.personal`` names and the client keeps (``client.state = "client"``);
    the body b is what is sent. A client that takes no more than ``head_steps`` sends no change.
    Source: Collins et al. 2021, Algorithm 1.
    """

    lr: Annotated[float, Gt(0), Doc("The rate of a step of what is shared.")] = 0.1
    head_lr: Annotated[float, Gt(0), Doc("The rate of a step of what is personal.")] = 0.1
    head_steps: Annotated[
        int, Ge(1), Doc("Steps, the first of a round, that train what is personal.")
    ] = 5
    schedule: LocalSchedule = CONSTANT

    parts: ClassVar[bool] = True

    def numbers(self) -> dict[str, float]:
        """Both rates."""
        return {"lr": self.lr, "head_lr": self.head_lr}

    def phase(self, at: Step) -> Hashable:
        """Whether the head has its turn."""
        return at.index < self.head_steps

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """A step of the head, or of the body."""
        head: Tensor = state[PERSONAL_MASK]
        turn, rate = (head, "head_lr") if at.index < self.head_steps else (1 - head, "lr")
        moved = Dense(gradient.dense().mul_(turn))
        moved.subtract_from(state["theta"], state[rate] * at.number(self.schedule))

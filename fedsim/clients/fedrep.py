"""FedRep: a client first trains its personal head, and then the shared body."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.clients.base import PERSONAL_MASK, DenseGradient, Gradient, LocalAlgorithm, State, Step
from fedsim.clients.schedules import CONSTANT, LocalSchedule
from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.settings import Ge, Gt


@register("client", "fedrep")
@dataclass(frozen=True)
class FedRep(LocalAlgorithm):
    """``h <- h - head_lr g_h`` in the first steps of a round, then ``b <- b - lr g_b``.

    The head h has the parameters named by ``model.personal``, which the client stores between
    rounds (``client.state = "client"``); the body b is sent. A client with no more than
    ``head_steps`` steps sends an update of zero. Source: Collins et al. 2021, Algorithm 1.
    """

    lr: Annotated[float, Gt(0)] = 0.1
    """The learning rate of the shared parameters."""
    head_lr: Annotated[float, Gt(0)] = 0.1
    """The learning rate of the personal parameters (the head)."""
    head_steps: Annotated[int, Ge(1)] = 5
    """How many steps at the start of a round train the personal parameters (the head) alone."""
    schedule: LocalSchedule = CONSTANT

    separates_personal: ClassVar[bool] = True

    def numbers(self) -> dict[str, float]:
        """Both learning rates."""
        return {"lr": self.lr, "head_lr": self.head_lr}

    def phase(self, at: Step) -> Hashable:
        """True for a step of the head, False for one of the body."""
        return at.index < self.head_steps

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Make a step of the head, or of the body."""
        head: Tensor = state[PERSONAL_MASK]
        mask, rate = (head, "head_lr") if at.index < self.head_steps else (1 - head, "lr")
        masked_gradient = DenseGradient(gradient.dense().mul_(mask))
        masked_gradient.subtract_from(state["theta"], state[rate] * at.number(self.schedule))

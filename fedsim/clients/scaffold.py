"""SCAFFOLD: local steps that are corrected by how a client's gradient differs from all clients'."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fedsim.clients.base import Combined, Dense, Gradient, LocalAlgorithm, State, Step
from fedsim.clients.schedules import CONSTANT, LocalSchedule
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.rows.layout import Width
from fedsim.settings import Doc, Gt


@register("client", "scaffold")
@dataclass(frozen=True)
class Scaffold(LocalAlgorithm):
    """``y <- y - lr (g(y) - c_i + c)``, with control variates c of the server, c_i of the client.

    After its K steps from x a client's new variate is, with ``control = "steps"`` (option II),
    ``c_i - c + (x - y) / (K lr)``; with ``"gradient"`` (option I) the mean of as many batches'
    gradients at x: gradient evaluations then take turns, the first is a step's. It keeps that
    (``client.state = "client"``), and sends the difference beside its update; the server adds
    their mean times the share of the population that took part. Under a schedule K lr is the sum
    of the rates. For c to stay the mean of all c_i updates must be neither weighed nor bounded:
    ``mechanism.name = "none"`` with ``weighting = "uniform"``. Source: Karimireddy et al. 2020,
    Algorithm 1.
    """

    lr: Annotated[float, Gt(0), Doc("The rate of a local step.")] = 0.1
    control: Annotated[
        Literal["steps", "gradient"],
        Doc(
            "What a client's variate is made of: the steps that it took (option II), or gradients "
            "at the server's model, which every other batch goes to (option I)."
        ),
    ] = "steps"
    schedule: LocalSchedule = CONSTANT

    carried: ClassVar[tuple[str, ...]] = ("variate",)
    sends: ClassVar[Mapping[str, Width]] = {"control": "model"}
    remembers: ClassVar[bool] = True
    plain_means: ClassVar[bool] = True

    def numbers(self) -> dict[str, float]:
        """The rate."""
        return {"lr": self.lr}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Variates zero, nothing walked."""
        state = super().init(theta, numbers)
        state |= {"variate": torch.zeros_like(theta), "start": theta.clone()}
        state["walked"] = torch.zeros_like(state["lr"])
        if self.control == "gradient":
            state["sum"] = torch.zeros_like(theta)
            state["at-start"] = torch.zeros(len(theta), 1, dtype=torch.bool, device=theta.device)
        return state

    def point(self, state: State) -> Tensor:
        """The client's model, or every other time the server's."""
        if self.control == "steps":
            return super().point(state)
        return torch.where(state["at-start"], state["start"], state["theta"])

    def phase(self, at: Step) -> Hashable:
        """By whether it is a step's or the variate's turn."""
        return "step" if self.control == "steps" else at.index % 2

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """A corrected step, or one more gradient of the variate's."""
        if self.control == "gradient":
            state["at-start"] = ~state["at-start"]
            if at.index % 2:
                state["sum"] = state["sum"] + gradient.dense()
                state["walked"] = state["walked"] + 1
                return
        rate = state["lr"] * at.number(self.schedule)
        corrected = gradient.dense().sub_(state["variate"]).add_(state["control"])
        Dense(corrected).subtract_from(state["theta"], rate)
        if self.control == "steps":
            state["walked"] = state["walked"] + rate

    def finish(self, state: State) -> Tensor:
        """The client's model; its new variate takes the old one's place."""
        theta, old = state["theta"], state["variate"]
        walked = state["walked"].unsqueeze(1)
        if self.control == "gradient":
            new = state["sum"] / walked
        else:
            new = old - state["control"] + (state["start"] - theta) / walked
        # Without a gradient to make a new one of, the old one stays.
        state["variate"] = torch.where(walked > 0, new, old)
        state["change"] = state["variate"] - old
        return super().finish(state)

    def send(self, state: State) -> dict[str, Tensor]:
        """By how much the variate has changed."""
        return {"control": state["change"]}

    def combine(
        self,
        update: Tensor,
        mean: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        share: float,
    ) -> Combined:
        """``c <- c + |S| / N mean (c_i+ - c_i)``."""
        return Combined(update, {"control": received["control"] + share * mean["control"]})

"""SCAFFOLD: local steps corrected by the difference of a client's gradient from the mean."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from fedsim.clients.base import (
    DenseGradient,
    Gradient,
    RoundMeans,
    RunFacts,
    ServerUpdate,
    State,
    Step,
)
from fedsim.clients.sgd import SGD
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.mechanisms import Mechanism
from fedsim.registry import register
from fedsim.rows.layout import Width


@register("client", "scaffold")
@dataclass(frozen=True)
class Scaffold(SGD):
    """``y <- y - lr (g(y) - c_i + c)``, with control variates c of the server, c_i of the client.

    After its K steps from x a client's new variate is, with ``control = "steps"`` (option II),
    ``c_i - c + (x - y) / (K lr)``. With ``"gradient"`` (option I) it is the mean of gradients at x
    over batches of their own: evaluations then alternate, beginning with one for a step. The client
    stores its variate (``client.state = "client"``), and sends the change in addition to its
    update; the server adds the mean change times the share of the population that took part. Under
    a schedule, the sum of the rates replaces K lr. With momentum, which starts at zero in every
    round, the distance of the same steps along a constant gradient of 1 replaces it, so that a
    variate is still a weighted mean of gradients. Weight decay counts as gradient. For c to stay
    the mean of all c_i, updates must be neither weighted nor bounded: ``mechanism.name = "none"``
    with ``weighting = "uniform"``. In a private run clients send their update alone, under option
    II (`PrivateScaffold`). Source: Karimireddy et al. 2020, Algorithm 1, which this is for
    momentum 0.
    """

    control: Literal["steps", "gradient"] = "steps"
    """How a client updates its control variate: from the steps that it took (option II of the
    paper), or from gradients at the server's model, for which every other batch is used (option
    I)."""

    carried: ClassVar[tuple[str, ...]] = ("variate",)
    sends: ClassVar[Mapping[str, Width]] = {"control": "model"}
    requires_client_state: ClassVar[bool] = True
    requires_plain_means: ClassVar[bool] = True

    def for_run(self, facts: RunFacts) -> Scaffold:
        """The algorithm itself, or in a private run a `PrivateScaffold` with its settings.

        Raises
        ------
        FedsimError
            If the variates of a private run would not be a function of the releases.
        """
        return PrivateScaffold.from_scaffold(self, facts) if facts.private else self

    def init(self, theta: Tensor, numbers: State) -> State:
        """Initial state of `SGD`, with a variate of zero."""
        state = super().init(theta, numbers)
        zeros = torch.zeros_like(state["lr"])
        state |= {"variate": torch.zeros_like(theta), "start": theta.clone()}
        state |= {"moved": zeros, "speed": zeros.clone()}
        if self.control == "gradient":
            state["sum"] = torch.zeros_like(theta)
            state["at-start"] = torch.zeros(len(theta), 1, dtype=torch.bool, device=theta.device)
        return state

    def point(self, state: State) -> Tensor:
        """The client's model; under option I at every second evaluation the server's."""
        if self.control == "steps":
            return super().point(state)
        return torch.where(state["at-start"], state["start"], state["theta"])

    def phase(self, at: Step) -> Hashable:
        """One key for all steps; under option I 0 for a step, 1 for a gradient of the variate."""
        return "step" if self.control == "steps" else at.index % 2

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Make a corrected step, or add a gradient to the sum for the variate."""
        if self.control == "gradient":
            state["at-start"] = ~state["at-start"]
            if at.index % 2:
                state["sum"] = state["sum"] + gradient.dense()
                state["moved"] = state["moved"] + 1
                return
        corrected = gradient.dense().sub_(state["variate"]).add_(state["control"])
        super().step(state, DenseGradient(corrected), at)
        if self.control == "steps":
            self.add_distance(state, 1.0, state["lr"] * at.number(self.schedule))

    def finish(self, state: State) -> Tensor:
        """The client's parameters; replaces its variate by the new one."""
        theta, old = state["theta"], state["variate"]
        moved = state["moved"].unsqueeze(1)
        if self.control == "gradient":
            new = state["sum"] / moved
        else:
            new = old - state["control"] + (state["start"] - theta) / moved
        # Without any gradient (moved is 0) the old variate is kept.
        state["variate"] = torch.where(moved > 0, new, old)
        state["change"] = state["variate"] - old
        return super().finish(state)

    def send(self, state: State) -> dict[str, Tensor]:
        """The change of the variate, ``[n, D]``."""
        return {"control": state["change"]}

    def combine(self, means: RoundMeans) -> ServerUpdate:
        """``c <- c + |S| / N mean (c_i+ - c_i)``."""
        change = means.share * means.sent["control"]
        return ServerUpdate(means.update, {"control": means.received["control"] + change})


@dataclass(frozen=True)
class PrivateScaffold(Scaffold):
    """SCAFFOLD for private runs: only updates are released, and the server computes c from them.

    Under option II ``c_i+ - c_i = -c - Dy_i / (K lr)`` follows from the update ``Dy_i`` and public
    numbers, so that its sum over clients follows from the sum of updates: ``c <- (1 - q) c - q
    Dy / (K lr)``, with the released mean ``Dy`` and the expected share q of the population in a
    round. No second vector is sent or charged (DP-SCAFFOLD, Noble et al. 2022, without its second
    release). c is then the mean of all c_i, except for the noise and for clients that were sampled
    and did not reply. The standard deviation of the noise in c approaches
    ``z C / (N K lr sqrt(1 - (1 - q)^2))`` in each coordinate, and enters every local step.

    Attributes
    ----------
    mechanism : Mechanism or None
        Mechanism that bounds the update from which a client computes its variate, as in the sum;
        None where updates are not bounded (example-level privacy).
    steps : int
        K, the number of local steps, the same for every client.
    """

    mechanism: Mechanism | None = None
    steps: int = 1

    sends: ClassVar[Mapping[str, Width]] = {}
    receives: ClassVar[Mapping[str, Width]] = {"control": "model"}

    @classmethod
    def from_scaffold(cls, scaffold: Scaffold, facts: RunFacts) -> Self:
        """A private SCAFFOLD with the settings of ``scaffold``.

        Raises
        ------
        FedsimError
            If clients make different numbers of steps, or if the variates would not be a function
            of the releases.
        """
        if scaffold.control != "steps":
            raise FedsimError(
                "client.control is 'gradient', which takes a second vector from each client; in a "
                "private run it must be 'steps', whose vector follows from the released update."
            )
        if facts.steps is None:
            raise FedsimError(
                "client.steps is 0 or client.work is set, and SCAFFOLD is private; client.steps "
                "must be the number of local steps of every client, and client.work empty: the "
                "server computes the control variate from it."
            )
        return cls(**vars(scaffold), mechanism=facts.client_mechanism(scaffold), steps=facts.steps)

    def finish(self, state: State) -> Tensor:
        """The client's parameters; updates its variate from the bounded update, as in the sum."""
        end: Tensor = state["theta"]
        update = end - state["start"]
        if self.mechanism is not None:
            update = self.mechanism.bound(update)
        moved, old = state["moved"].unsqueeze(1), state["variate"]
        new = old - state["control"] - update / moved
        state["variate"] = torch.where(moved > 0, new, old)
        return end

    def send(self, state: State) -> dict[str, Tensor]:
        """No vectors."""
        return {}

    def combine(self, means: RoundMeans) -> ServerUpdate:
        """``c <- (1 - q) c - q Dy / (K lr)``."""
        state: State = dict.fromkeys(("moved", "speed"), torch.zeros((), dtype=torch.float64))
        for k in range(self.steps):
            self.add_distance(state, 1.0, self.lr * self.schedule(Step(means.round, k)))
        moved = float(state["moved"])
        if not moved:  # a learning rate of 0 (a schedule's end): clients keep their variates
            return ServerUpdate(means.update, means.received)
        control = means.received["control"] + means.update / moved
        return ServerUpdate(
            means.update, {"control": means.received["control"] - means.share * control}
        )

"""FedNova: updates normalised by the clients' numbers of local steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.clients.base import Gradient, RoundMeans, RunFacts, ServerUpdate, State, Step
from fedsim.clients.proximal import PROXIMAL
from fedsim.clients.sgd import SGD
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.rows.layout import Width
from fedsim.settings import Ge


@register("client", "fednova")
@dataclass(frozen=True)
class FedNova(SGD):
    """`SGD` with each client's update divided by the distance a that its steps would cover.

    a is the distance for a constant gradient of 1, in units of lr: ``a = E`` for E plain steps,
    ``(E - rho (1 - rho^E) / (1 - rho)) / (1 - rho)`` with momentum rho, ``(1 - (1 - lr mu)^E) /
    (lr mu)`` with ``client.proximal`` mu; with both, or with a schedule, it is computed step by
    step. The server steps along ``(sum p_i a_i) (sum p_i Dy_i / a_i)``, with the mechanism's
    weights p_i: clients with more steps have no more influence than their weight. If all clients
    make equally many steps, it is FedAvg. In a private run the public number ``reach`` replaces
    ``sum p_i a_i``, which would reveal clients' numbers of examples, and a client's row is
    ``reach`` times its direction ``Dy_i / a_i``. Weight decay counts as gradient. Source: Wang et
    al. 2020, equations 9 to 11.
    """

    # The momentum is not carried over: the formula for a assumes that it starts at zero.
    carried: ClassVar[tuple[str, ...]] = ()

    reach: Annotated[float, Ge(0)] = 0.0
    """tau_eff, the number of steps that the server takes along the mean normalised update: a public
    number, which private runs need; 0 for the mean of the clients' own numbers, which they then
    send."""

    def for_run(self, facts: RunFacts) -> FedNova:
        """The algorithm itself, after a check that a private run has a public ``reach``.

        Raises
        ------
        FedsimError
            If it has none.
        """
        if facts.private and not self.reach:
            raise FedsimError(
                "client.reach is 0; in a private run it must be a public number above 0, such as "
                "the usual number of local steps: the clients' own numbers of steps depend on "
                "their data."
            )
        return self

    @property
    def sends(self) -> Mapping[str, Width]:
        """The distance a of a client, unless ``reach`` is set: it depends on the client's data."""
        return {} if self.reach else {"reach": "number"}

    def init(self, theta: Tensor, numbers: State) -> State:
        """Initial state of `SGD`, plus the start of the round and a distance of 0."""
        state = super().init(theta, numbers)
        zeros = torch.zeros_like(state["lr"])
        return state | {"start": theta.clone(), "moved": zeros, "speed": zeros.clone()}

    def phase(self, at: Step) -> Hashable:
        """One key for all steps."""
        return "step"

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Make a step of `SGD`, and the same step of a number along a gradient of 1."""
        super().step(state, gradient, at)
        slope: Tensor = torch.ones_like(state["moved"])
        if PROXIMAL in state:
            slope = slope - state["lr"] * state[PROXIMAL] * state["moved"]
        self.add_distance(state, slope, at.number(self.schedule))

    def finish(self, state: State) -> Tensor:
        """The parameters after the normalised update."""
        start: Tensor = state["start"]
        moved = state["moved"].unsqueeze(1)
        # At a learning rate of 0 (a schedule's end) a client does not move, and has no direction.
        factor = torch.where(moved != 0, (self.reach or 1.0) / moved, 0.0)
        normalised: Tensor = start + (super().finish(state) - start) * factor
        return normalised

    def send(self, state: State) -> dict[str, Tensor]:
        """The distance a, ``[n, 1]``, unless ``reach`` is set."""
        return {} if self.reach else {"reach": state["moved"].unsqueeze(1).to(state["theta"])}

    def combine(self, means: RoundMeans) -> ServerUpdate:
        """The mean direction times the mean distance."""
        return ServerUpdate(means.update * means.sent["reach"], means.received)

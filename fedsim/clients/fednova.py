"""FedNova: updates that count by their direction, however many steps clients have taken."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.clients.base import Combined, Gradient, RoundMeans, RunFacts, State, Step
from fedsim.clients.proximal import PROXIMAL
from fedsim.clients.sgd import SGD
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.rows.layout import Width
from fedsim.settings import Doc, Ge


@register("client", "fednova")
@dataclass(frozen=True)
class FedNova(SGD):
    """`SGD` whose update is divided by how far such steps go along a constant gradient of 1.

    That is ``a = E`` for E plain steps of one rate, ``(E - rho (1 - rho^E) / (1 - rho)) / (1 -
    rho)`` with momentum rho, ``(1 - (1 - lr mu)^E) / (lr mu)`` with ``client.proximal`` mu, and
    whatever it is with both or a schedule. The server steps along ``(sum p_i a_i) (sum p_i Dy_i /
    a_i)``, weighed as the mechanism weighs: clients with more steps pull the model no further than
    their weights say. Where all have taken as many it is FedAvg. In a private run the public
    ``reach`` takes the place of ``sum p_i a_i``, and a client's row is ``reach`` times its
    direction: how far each has gone follows from its data. Source: Wang et al. 2020,
    equations 9 to 11; weight decay counts as gradient.
    """

    # A momentum starts at zero in every round, as the formula for a supposes.
    carried: ClassVar[tuple[str, ...]] = ()

    reach: Annotated[
        float,
        Ge(0),
        Doc(
            "How far the model goes along the mean direction, a public number, as a private run "
            "needs it; 0 for the mean of how far clients have gone, which they then send."
        ),
    ] = 0.0

    def for_run(self, facts: RunFacts) -> FedNova:
        """The same, if a private run has the public number that it needs.

        Raises
        ------
        FedsimError
            If it has not.
        """
        if facts.private and not self.reach:
            raise FedsimError(
                "client.reach is 0; in a private run it must be a public number above 0, such as "
                "the usual number of local steps: how far clients have gone follows from their "
                "data."
            )
        return self

    @property
    def sends(self) -> Mapping[str, Width]:
        """How far a client has gone, unless that is declared for all: it tells of its examples."""
        return {} if self.reach else {"reach": "number"}

    def init(self, theta: Tensor, numbers: State) -> State:
        """As `SGD`, at rest."""
        state = super().init(theta, numbers)
        zeros = torch.zeros_like(state["lr"])
        return state | {"start": theta.clone(), "moved": zeros, "speed": zeros.clone()}

    def phase(self, at: Step) -> Hashable:
        """All steps are alike."""
        return "step"

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """A step; and one of a number along a gradient of 1, in units of lr."""
        super().step(state, gradient, at)
        slope: Tensor = torch.ones_like(state["moved"])
        if PROXIMAL in state:
            slope = slope - state["lr"] * state[PROXIMAL] * state["moved"]
        self.follow(state, slope, at.number(self.schedule))

    def finish(self, state: State) -> Tensor:
        """Where the client is after the normalised update."""
        start: Tensor = state["start"]
        moved = state["moved"].unsqueeze(1)
        normalised: Tensor = start + (super().finish(state) - start) * ((self.reach or 1.0) / moved)
        return normalised

    def send(self, state: State) -> dict[str, Tensor]:
        """How far it has moved along a gradient of 1, unless that is declared."""
        return {} if self.reach else {"reach": state["moved"].unsqueeze(1).to(state["theta"])}

    def combine(self, means: RoundMeans) -> Combined:
        """The mean direction, as far as clients have moved in the mean."""
        return Combined(means.update * means.sent["reach"], means.received)

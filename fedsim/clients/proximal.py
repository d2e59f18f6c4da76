"""FedProx: any local algorithm on a loss with a pull towards the global model."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fedsim.clients.base import Combined, LocalAlgorithm, State, Step
from fedsim.clients.gradients import Dense, Gradient
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor
from fedsim.rows.vectors import Width
from fedsim.settings import Ge

__all__ = ["MU", "PROXIMAL", "Proximal", "told_numbers"]

PROXIMAL = "proximal"
"""mu, as a number of the algorithm and an entry of its state, ``[n]``."""

MU = "proximal-mu"
"""What Flower's FedProx calls it where it tells its clients."""


@dataclass(frozen=True)
class Proximal(LocalAlgorithm):
    """``algorithm`` on ``loss + mu / 2 ||theta - w_global||^2`` (Li et al. 2020).

    The pull does not depend on data: with privatised gradients it is added after the noise.

    Parameters
    ----------
    algorithm : LocalAlgorithm
    mu : float
        The weight of the pull, where the server does not say another (`told_numbers`).
    """

    algorithm: LocalAlgorithm
    mu: Annotated[float, Ge(0)]

    @property
    def carried(self) -> tuple[str, ...]:
        """What the algorithm inside keeps."""
        return self.algorithm.carried

    @property
    def evaluates(self) -> str:
        """As the algorithm inside."""
        return self.algorithm.evaluates

    @property
    def sends(self) -> Mapping[str, Width]:
        """As the algorithm inside."""
        return self.algorithm.sends

    @property
    def remembers(self) -> bool:
        """As the algorithm inside."""
        return self.algorithm.remembers

    @property
    def plain_means(self) -> bool:
        """As the algorithm inside."""
        return self.algorithm.plain_means

    @property
    def parts(self) -> bool:
        """As the algorithm inside."""
        return self.algorithm.parts

    def numbers(self) -> dict[str, float]:
        """Those of the algorithm inside, and mu."""
        return {**self.algorithm.numbers(), PROXIMAL: self.mu}

    def init(self, theta: Tensor, numbers: State) -> State:
        """The state inside, the global parameters, and mu."""
        numbers = dict(numbers)
        mu = numbers.pop(PROXIMAL)
        return {**self.algorithm.init(theta, numbers), "anchor": theta.clone(), PROXIMAL: mu}

    def point(self, state: State) -> Tensor:
        """Where the algorithm inside wants its gradient."""
        return self.algorithm.point(state)

    def phase(self, at: Step) -> Hashable:
        """That of the algorithm inside."""
        return self.algorithm.phase(at)

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """A step of the algorithm inside on the gradient with the pull."""
        pull = self.algorithm.point(state).sub(state["anchor"])
        pull.mul_(state[PROXIMAL].unsqueeze(1))
        self.algorithm.step(state, Dense(pull.add_(gradient.dense())), at)

    def finish(self, state: State) -> Tensor:
        """As the algorithm inside."""
        return self.algorithm.finish(state)

    def report(self, state: State) -> dict[str, Tensor]:
        """As the algorithm inside."""
        return self.algorithm.report(state)

    def send(self, state: State) -> dict[str, Tensor]:
        """As the algorithm inside."""
        return self.algorithm.send(state)

    def combine(
        self,
        update: Tensor,
        mean: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        share: float,
    ) -> Combined:
        """As the algorithm inside."""
        return self.algorithm.combine(update, mean, received, share)


def told_numbers(algorithm: LocalAlgorithm, config: Mapping[str, object]) -> dict[str, float]:
    """What the config entries of a round's instructions say of the algorithm's numbers: `MU`.

    Raises
    ------
    FedsimError
        If the algorithm has no pull, or the server's is no weight of one.
    """
    mu = config.get(MU, 0.0)
    if MU not in config or (mu == 0 and PROXIMAL not in algorithm.numbers()):
        return {}
    if not isinstance(mu, int | float) or not 0 <= mu < math.inf:
        raise FedsimError(f"the server sends {MU} = {mu!r}; it must be a number from 0 on.")
    if PROXIMAL not in algorithm.numbers():
        raise FedsimError(
            f"the server sends {MU} = {mu}, and client.proximal is 0; it must be above 0 where "
            "clients are pulled to the server's model, and is then what the server says."
        )
    return {PROXIMAL: float(mu)}

"""FedProx: any local algorithm on a loss with a pull towards the global model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fedsim.clients.base import Combined, LocalAlgorithm, State, Step
from fedsim.clients.gradients import Dense, Gradient
from fedsim.lazy import Tensor
from fedsim.rows.vectors import Width
from fedsim.settings import Ge

__all__ = ["PULL", "Proximal"]

PULL = "proximal-pull"
"""Entry of the state, ``[n]``: mu, for an algorithm inside that must know of it."""


@dataclass(frozen=True)
class Proximal(LocalAlgorithm):
    """``algorithm`` on ``loss + mu / 2 ||theta - w_global||^2`` (Li et al. 2020).

    The pull does not depend on data: with privatised gradients it is added after the noise.

    Parameters
    ----------
    algorithm : LocalAlgorithm
    mu : float
        The weight of the pull.
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
        """Those of the algorithm inside."""
        return self.algorithm.numbers()

    def init(self, theta: Tensor, numbers: State) -> State:
        """The state inside, the global parameters, and mu."""
        inside = self.algorithm.init(theta, numbers)
        return {**inside, "anchor": theta.clone(), PULL: theta.new_full((len(theta),), self.mu)}

    def point(self, state: State) -> Tensor:
        """Where the algorithm inside wants its gradient."""
        return self.algorithm.point(state)

    def phase(self, at: Step) -> Hashable:
        """That of the algorithm inside."""
        return self.algorithm.phase(at)

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """A step of the algorithm inside on the gradient with the pull."""
        pull = self.algorithm.point(state).sub(state["anchor"]).mul_(self.mu)
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

"""FedProx: a wrapper that adds a pull towards the global model to any local algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fedsim.clients.base import DenseGradient, Gradient, LocalAlgorithm, RunFacts, State, Step
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor
from fedsim.settings import Ge

PROXIMAL = "proximal"
"""Name of mu among the algorithm's numbers and in its state, ``[n]``."""

MU = "proximal-mu"
"""Name of mu in the config that Flower's FedProx sends to clients."""


def _inner(name: str) -> Any:
    return property(lambda self: getattr(self.algorithm, name), doc="As the algorithm inside.")


@dataclass(frozen=True)
class Proximal(LocalAlgorithm):
    """``algorithm`` on ``loss + mu / 2 ||theta - w_global||^2`` (Li et al. 2020).

    The pull does not depend on data: with privatised gradients it is added after the noise.

    Parameters
    ----------
    algorithm : LocalAlgorithm
    mu : float
        The weight of the pull, unless the server sends another (`server_numbers`).
    """

    algorithm: LocalAlgorithm
    mu: Annotated[float, Ge(0)]

    carried, evaluates = _inner("carried"), _inner("evaluates")
    sends, receives = _inner("sends"), _inner("receives")
    requires_client_state = _inner("requires_client_state")
    requires_plain_means = _inner("requires_plain_means")
    separates_personal = _inner("separates_personal")
    point, phase, finish = _inner("point"), _inner("phase"), _inner("finish")
    report, send, combine = _inner("report"), _inner("send"), _inner("combine")
    label = _inner("label")

    def for_run(self, facts: RunFacts) -> Proximal:
        """The same pull on the wrapped algorithm, with the settings of that chosen for this run."""
        return replace(self, algorithm=self.algorithm.for_run(facts))

    def numbers(self) -> dict[str, float]:
        """The wrapped algorithm's numbers, and mu."""
        return {**self.algorithm.numbers(), PROXIMAL: self.mu}

    def init(self, theta: Tensor, numbers: State) -> State:
        """The wrapped algorithm's state, the global parameters, and mu."""
        numbers = dict(numbers)
        mu = numbers.pop(PROXIMAL)
        return {**self.algorithm.init(theta, numbers), "anchor": theta.clone(), PROXIMAL: mu}

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Make a step of the wrapped algorithm, with the pull added to the gradient."""
        pull = self.algorithm.point(state).sub(state["anchor"])
        pull.mul_(state[PROXIMAL].unsqueeze(1))
        self.algorithm.step(state, DenseGradient(pull.add_(gradient.dense())), at)


def server_numbers(algorithm: LocalAlgorithm, config: Mapping[str, object]) -> dict[str, float]:
    """The algorithm's numbers that the server sets in a round's config: mu, from the entry `MU`.

    Raises
    ------
    FedsimError
        If the algorithm has no pull, or the server's mu is not a number of 0 or more.
    """
    mu = config.get(MU, 0.0)
    if MU not in config or (mu == 0 and PROXIMAL not in algorithm.numbers()):
        return {}
    if not isinstance(mu, int | float) or not 0 <= mu < math.inf:
        raise FedsimError(f"the server sends {MU} = {mu!r}; it must be a number, 0 or more.")
    if PROXIMAL not in algorithm.numbers():
        raise FedsimError(
            f"the server sends {MU} = {mu}, and client.proximal is 0; set it above 0 to pull "
            "clients to the server's model; the server's value then replaces it."
        )
    return {PROXIMAL: float(mu)}

"""Privacy cost of model selection: only the best of a random number of runs is published.

If the number K of runs is random and all but the best stay secret, the cost is little more than
one run's, and far less than that of publishing all K (Liu and Talwar 2019; Papernot and Steinke
2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, get_args

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Inclusion, Law, WrappingLaw
from fedsim.privacy.laws.full import FullLaw
from fedsim.privacy.losses import ORDERS, Array, bisected, gaussian_rdp, rdp_delta
from fedsim.settings import Ge

Distribution = Literal["logarithmic", "geometric", "poisson"]


@dataclass(frozen=True)
class Selection:
    """Distribution of the number of runs of which the best is published.

    Attributes
    ----------
    distribution : "logarithmic", "geometric" or "poisson"
        Poisson costs least for few runs; the number of runs may then be 0.
    mean : float
        Mean number of runs, above 1.

    Raises
    ------
    FedsimError
        If the distribution is unknown, or the mean is not above 1.
    """

    distribution: Distribution
    mean: float

    def __post_init__(self) -> None:
        if self.distribution not in get_args(Distribution) or not 1 < self.mean < math.inf:
            raise FedsimError(
                f"the best of a {self.distribution} number of runs of mean {self.mean:g} is to be "
                f"selected (--select-number, --select-mean); it must be "
                f"{', '.join(get_args(Distribution))}, of a mean above 1."
            )

    @property
    def gamma(self) -> float:
        """Parameter gamma of the logarithmic or geometric distribution with this mean."""
        if self.distribution == "geometric":
            return 1 / self.mean

        # The logarithmic distribution's mean is (1 / gamma - 1) / log(1 / gamma), which rises as
        # gamma falls: log(1 / gamma) is found by bisection.
        def is_small(log: float) -> bool:
            return math.expm1(log) / log >= self.mean

        return math.exp(-bisected(is_small, most=1e4, tolerance=1e-12)[1])

    def draw(self, generator: np.random.Generator) -> int:
        """Draw the number of runs."""
        if self.distribution == "poisson":
            return int(generator.poisson(self.mean))
        if self.distribution == "geometric":
            return int(generator.geometric(self.gamma))
        return int(generator.logseries(1 - self.gamma))

    def renyi(self, base: Array) -> Array:
        """Rényi curve of the published run at `ORDERS`, given that of a single run.

        Theorems 2 and 6 of Papernot and Steinke (2022).
        """
        several = math.log(self.mean) / (ORDERS - 1)
        if self.distribution == "poisson":
            # Theorem 6: at each order, delta of a single run at epsilon = log(1 + 1/(order - 1)).
            epsilons = np.log1p(1 / (ORDERS - 1))
            deltas = [rdp_delta(base, float(epsilon)) for epsilon in epsilons]
            return base + self.mean * np.array(deltas) + several
        # Theorem 2, for the truncated negative binomial distribution, which is logarithmic for
        # eta = 0 and geometric for eta = 1. Its second order is free: take the best, for all.
        eta = 1 if self.distribution == "geometric" else 0
        per_order = (1 - 1 / ORDERS) * base - math.log(self.gamma) / ORDERS
        return np.asarray(base + (1 + eta) * per_order.min() + several)


@dataclass(frozen=True, kw_only=True)
class SelectionLaw(WrappingLaw):
    """Law of all releases of a run that is published as the best of a random number of runs.

    Attributes
    ----------
    base : Law
        Law of one release of a run.
    invocations : int
        How often it is charged in a run.
    distribution, mean
        Distribution of the number of runs, as in `Selection`.
    rounds : int
        Number of rounds of a run.
    """

    name: ClassVar[str] = "selection"

    base: Law = field(default_factory=FullLaw)
    invocations: Annotated[int, Ge(1)] = 1
    distribution: Distribution = "logarithmic"
    mean: float = 2.0
    rounds: Annotated[int, Ge(1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        Selection(self.distribution, self.mean)
        if self.base.adjacency != self.adjacency:
            raise FedsimError("a selection among runs has the neighbours of its runs.")

    def gaussian(self, noise_multiplier: float) -> None:
        """None: the best of several runs is not a Gaussian."""

    def rdp(self, noise_multiplier: float) -> Array:
        """Rényi curve of all releases of the published run together."""
        return _selected(self, noise_multiplier)

    @property
    def is_gaussian(self) -> bool:
        """False: selection makes it something else."""
        return False

    def inclusion(self, population: int) -> Inclusion | None:
        """Inclusion probabilities of the base, if its rounds are drawn independently."""
        return self.base.inclusion(population) if self.base.rounds == 1 else None

    @property
    def label(self) -> str:
        """Short description, for tables."""
        return f"{self.base.label}; the best of {self.mean:g} runs"

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled and the run selected: a phrase of the privacy statement."""
        return (
            f"{self.base.sentence(row)}; the best of a random number of such runs was published, "
            f"{self.mean:g} on average ({self.distribution}), and the others are not revealed"
        )


@lru_cache(maxsize=256)
def _selected(law: SelectionLaw, noise_multiplier: float) -> Array:
    mu = law.base.gaussian(noise_multiplier)
    single_run = law.base.rdp(noise_multiplier) if mu is None else gaussian_rdp(mu)
    return Selection(law.distribution, law.mean).renyi(law.invocations * single_run)

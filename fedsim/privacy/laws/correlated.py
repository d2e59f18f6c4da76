"""Laws of noise that is correlated over rounds: several rounds together are one Gaussian.

`CorrelatedLaw` is the cost of a plan of such rounds, `ExtendedLaw` the additional cost of making
a plan longer that has already been charged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Inclusion, Law, WrappingLaw
from fedsim.privacy.laws.full import FullLaw
from fedsim.privacy.losses import Array, DominatingPair, gaussian_rdp
from fedsim.settings import Ge, Gt


@dataclass(frozen=True, kw_only=True)
class CorrelatedLaw(WrappingLaw):
    """The cost of several rounds with noise ``C^-1 Z``, for a lower triangular matrix C.

    With X the sums of the rounds, releasing ``X + C^-1 Z`` is post-processing of the one Gaussian
    ``C X + Z``. It costs as much as one draw of ``base`` in which a row's norm is `sensitivity`
    times its clip norm (Choquette-Choo et al. 2023; Li et al. 2015).

    Attributes
    ----------
    base : Law
        Law of the sampling in these rounds; `FullLaw` where it gives no amplification.
    noise : str
        Name of the noise, as in a config's ``noise.name``.
    coefficients : str
        SHA-256 of the noise's coefficients, in hexadecimal.
    sensitivity : float
        L2 sensitivity of ``C X`` to one row, in units of its clip norm.
    rounds : int
        Number of rounds that are charged together.
    again : float
        The same sensitivity for one round that is repeated with different data.
    """

    name: ClassVar[str] = "correlated"

    base: Law = field(default_factory=FullLaw)
    noise: str = ""
    coefficients: str = ""
    sensitivity: Annotated[float, Gt(0)] = 1.0
    rounds: Annotated[int, Ge(1)] = 1
    again: Annotated[float, Gt(0)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base.adjacency != self.adjacency or isinstance(self.base, CorrelatedLaw):
            raise FedsimError("noise that is correlated has a base of the same neighbours.")

    @property
    def redrawn(self) -> Law:
        """Law of one repeated round: one further row of C, without amplification by sampling."""
        base = FullLaw(adjacency=self.adjacency, population=self.population)
        return replace(self, base=base, sensitivity=self.again, rounds=1)

    def gaussian(self, noise_multiplier: float) -> float | None:
        """``mu``, sensitivity over standard deviation; None where sampling amplifies."""
        return self.base.gaussian(noise_multiplier / self.sensitivity)

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair] | None:
        """Dominating pairs of the base, at the multiplier divided by the sensitivity."""
        return self.base.pairs(noise_multiplier / self.sensitivity)

    def rdp(self, noise_multiplier: float) -> Array:
        """Rényi curve of the base, at the multiplier divided by the sensitivity."""
        return self.base.rdp(noise_multiplier / self.sensitivity)

    def inclusion(self, population: int) -> Inclusion | None:
        """Inclusion probabilities of the base; None where sampling is not credited."""
        return None if self.rate == 1 else self.base.inclusion(population)

    @property
    def label(self) -> str:
        """Short description, for tables."""
        base = "no amplification" if self.rate == 1 else self.base.label
        return f"{self.noise} noise over {self.rounds:,} round{'s' * (self.rounds != 1)}, {base}"

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled and noised: a phrase of the privacy statement."""
        draws = "no amplification by sampling" if self.rate == 1 else self.base.sentence(row)
        return (
            f"{draws}; noise correlated over rounds ({self.noise}), every {self.rounds:,} of which "
            f"are charged together, as one Gaussian of sensitivity {self.sensitivity:.4g} C"
        )


@dataclass(frozen=True)
class Extension:
    """Record that a plan was made longer during the run.

    Attributes
    ----------
    rounds : int
        Number of rounds of the plan before.
    after : int
        Number of rounds already released then.
    """

    rounds: int
    after: int


@dataclass(frozen=True, kw_only=True)
class ExtendedLaw(WrappingLaw):
    """Additional cost of a plan of correlated rounds that extends a shorter one of the same matrix.

    The shorter plan's rounds are the first of the longer one's, with the same draws, so that both
    together are one Gaussian of the longer plan's sensitivity. Over plain Gaussians the squares of
    sensitivities add up. This law therefore has the root of the difference of the squares, and
    the two together cost as much as the longer plan, not the sum of both.

    Attributes
    ----------
    base : CorrelatedLaw
        Law of the longer plan, without amplification by sampling.
    shorter : CorrelatedLaw
        Law of the shorter plan, charged by an earlier line of the ledger.
    """

    name: ClassVar[str] = "extended"

    shorter: Law

    def __post_init__(self) -> None:
        super().__post_init__()
        longer, shorter = self.base, self.shorter
        if not (
            isinstance(longer, CorrelatedLaw)
            and isinstance(shorter, CorrelatedLaw)
            and longer.rate == shorter.rate == 1
            and longer.adjacency == shorter.adjacency == self.adjacency
            and (longer.noise, longer.coefficients) == (shorter.noise, shorter.coefficients)
            and shorter.rounds < longer.rounds
            and shorter.sensitivity <= longer.sensitivity
        ):
            raise FedsimError(
                f"a plan ({self.shorter.label}) cannot be extended to {self.base.label}; it must "
                "have the same noise, in fewer rounds, and no amplification."
            )

    @property
    def sensitivity(self) -> float:
        """Root of the difference of the two plans' squared sensitivities."""
        return math.sqrt(self.base.sensitivity**2 - self.shorter.sensitivity**2)

    @property
    def rounds(self) -> int:
        """Number of rounds of the longer plan."""
        return self.base.rounds

    @property
    def continued(self) -> Law:
        """Law of the shorter plan, which must have been charged before."""
        return self.shorter

    def covers(self, law: Law) -> bool:
        """Whether ``law`` is the longer plan's, which both lines together pay for."""
        return self.base == law

    @property
    def redrawn(self) -> Law | None:
        """Law of one repeated round of the longer plan."""
        return self.base.redrawn

    def gaussian(self, noise_multiplier: float) -> float:
        """``mu`` of the difference: squares of both plans' ``mu`` subtracted, and the root."""
        mu, before = (law.gaussian(noise_multiplier) for law in (self.base, self.shorter))
        assert mu is not None
        assert before is not None
        return math.sqrt(mu**2 - before**2)

    def rdp(self, noise_multiplier: float) -> Array:
        """Rényi curve of the Gaussian with that ``mu``, at `ORDERS`."""
        return gaussian_rdp(self.gaussian(noise_multiplier))

    def inclusion(self, population: int) -> None:
        """None: rounds of a correlated plan are not independent draws that an audit could test."""

    @property
    def label(self) -> str:
        """Short description, for tables."""
        return f"{self.base.label}, extended from {self.shorter.rounds:,}"

    def sentence(self, row: str) -> str:
        """Which plan was extended to what: a phrase of the privacy statement."""
        return (
            f"a plan of {self.shorter.rounds:,} rounds was extended to {self.rounds:,}, which are "
            f"charged together, as one Gaussian of sensitivity {self.base.sensitivity:.4g} C "
            "(if no release has decided on it)"
        )

"""The law of noise that is correlated over rounds: several rounds together are one Gaussian.

And that of a plan of such rounds that was made longer: what they cost beyond the plan charged
before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Inclusion, Law, WrappingLaw
from fedsim.privacy.laws.full import FullLaw
from fedsim.privacy.losses import Array, DominatingPair, gaussian_rdp


@dataclass(frozen=True, kw_only=True)
class CorrelatedLaw(WrappingLaw):
    """The cost of several rounds with noise ``C^-1 Z``, for a lower triangular matrix C.

    They are one Gaussian on ``C X``, X being the rounds' sums: one draw of ``base`` of rows whose
    norm is `sensitivity` times that of a row (Choquette-Choo et al. 2023; Li et al. 2015).

    Attributes
    ----------
    base : Law
        How rows are drawn in these rounds: `FullLaw` if sampling amplifies nothing.
    noise : str
        The noise, as in a config's ``noise.name``.
    coefficients : str
        SHA-256 of its coefficients, in hexadecimal.
    sensitivity : float
        The most that one row moves ``C X``, over the bound of a row in one round.
    rounds : int
    again : float
        The same for one round that is repeated with other data.
    """

    name: ClassVar[str] = "correlated"

    base: Law = field(default_factory=FullLaw)
    noise: str = ""
    coefficients: str = ""
    sensitivity: float = 1.0
    rounds: int = 1
    again: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.sensitivity > 0 and self.again > 0) or self.rounds < 1:
            raise FedsimError(
                f"the sensitivities of '{self.noise}' noise are {self.sensitivity} and "
                f"{self.again}, over {self.rounds} rounds; they must be positive."
            )
        if self.base.adjacency != self.adjacency or isinstance(self.base, CorrelatedLaw):
            raise FedsimError("noise that is correlated has a base of the same neighbours.")

    @property
    def redrawn(self) -> Law:
        """One further row of C, without amplification by sampling."""
        base = FullLaw(adjacency=self.adjacency, population=self.population)
        return replace(self, base=base, sensitivity=self.again, rounds=1)

    def gaussian(self, noise_multiplier: float) -> float | None:
        """Sensitivity in standard deviations, if sampling amplifies nothing."""
        return self.base.gaussian(noise_multiplier / self.sensitivity)

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair] | None:
        """Those of the base, at the multiplier over the sensitivity."""
        return self.base.pairs(noise_multiplier / self.sensitivity)

    def rdp(self, noise_multiplier: float) -> Array:
        """That of the base, at the multiplier over the sensitivity."""
        return self.base.rdp(noise_multiplier / self.sensitivity)

    def inclusion(self, population: int) -> Inclusion | None:
        """What an audit may test of draws, if sampling amplifies."""
        return None if self.rate == 1 else self.base.inclusion(population)

    @property
    def label(self) -> str:
        """A few words for a table."""
        base = "no amplification" if self.rate == 1 else self.base.label
        if self.rounds == 1:
            return f"{self.noise} noise over the steps of a round, {base}"
        return f"{self.noise} noise over {self.rounds:,} rounds, {base}"

    def sentence(self, row: str) -> str:
        """How a ``row`` is drawn and noised, for a statement."""
        drawn = "no amplification by sampling" if self.rate == 1 else self.base.sentence(row)
        if row == "example":
            return (
                f"passes in one order a round ({drawn}); noise correlated over the steps of a "
                f"round ({self.noise}), which are charged together, as one Gaussian of sensitivity "
                f"{self.sensitivity:.4g} C"
            )
        return (
            f"{drawn}; noise correlated over rounds ({self.noise}), every {self.rounds:,} of which "
            f"are charged together, as one Gaussian of sensitivity {self.sensitivity:.4g} C"
        )


@dataclass(frozen=True)
class Extension:
    """That a plan was made longer while its rounds were being made.

    Attributes
    ----------
    rounds : int
        Of the plan before.
    after : int
        Rounds that had been made.
    """

    rounds: int
    after: int


@dataclass(frozen=True, kw_only=True)
class ExtendedLaw(WrappingLaw):
    """A plan of correlated rounds, less a shorter one of the same matrix that it extends.

    The shorter plan's rounds are the first of the longer one's, with the same draws, so that both
    together are one Gaussian of the longer plan's sensitivity. Squares of sensitivities add up
    over plain Gaussians: this one has the difference, and what is charged for both is the larger
    of the two, never their sum.

    Attributes
    ----------
    base : CorrelatedLaw
        Of the longer plan, in which no sampling is counted on.
    shorter : CorrelatedLaw
        Of the plan that an earlier line charges.
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
        """The root of the difference of the two plans' squares."""
        return math.sqrt(self.base.sensitivity**2 - self.shorter.sensitivity**2)

    @property
    def rounds(self) -> int:
        """Of the longer plan."""
        return self.base.rounds

    @property
    def continued(self) -> Law:
        """The shorter plan."""
        return self.shorter

    def covers(self, law: Law) -> bool:
        """Whether it is that of the longer plan."""
        return self.base == law

    @property
    def redrawn(self) -> Law | None:
        """That of the longer plan."""
        return self.base.redrawn

    def gaussian(self, noise_multiplier: float) -> float:
        """The difference in standard deviations."""
        mu, before = (law.gaussian(noise_multiplier) for law in (self.base, self.shorter))
        assert mu is not None
        assert before is not None
        return math.sqrt(mu**2 - before**2)

    def rdp(self, noise_multiplier: float) -> Array:
        """Of that Gaussian."""
        return gaussian_rdp(self.gaussian(noise_multiplier))

    def inclusion(self, population: int) -> None:
        """None, as of the plans."""

    @property
    def label(self) -> str:
        """A few words for a table."""
        return f"{self.base.label}, extended from {self.shorter.rounds:,}"

    def sentence(self, row: str) -> str:
        """What was extended, for a statement."""
        return (
            f"a plan of {self.shorter.rounds:,} rounds was extended to {self.rounds:,}, which are "
            f"charged together, as one Gaussian of sensitivity {self.base.sensitivity:.4g} C "
            "(if no release has decided on it)"
        )

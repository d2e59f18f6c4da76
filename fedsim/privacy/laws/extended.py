"""The law of a plan that was made longer: what its rounds cost beyond the plan charged before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Law, WrappingLaw
from fedsim.privacy.laws.correlated import CorrelatedLaw
from fedsim.privacy.losses import Array, gaussian_rdp


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

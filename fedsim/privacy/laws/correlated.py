"""Law of noise that is correlated over rounds: several rounds together are one Gaussian."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from fedsim.array_types import Floats
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Inclusion, Law, WrappingLaw
from fedsim.privacy.laws.full import FullLaw
from fedsim.privacy.losses import DominatingPair
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
    def redraw_law(self) -> Law:
        """Law of one repeated round: one further row of C, without amplification by sampling."""
        base = FullLaw(adjacency=self.adjacency, population=self.population)
        return replace(self, base=base, sensitivity=self.again, rounds=1)

    def gaussian(self, noise_multiplier: float) -> float | None:
        """``mu``, sensitivity over standard deviation; None where sampling amplifies."""
        return self.base.gaussian(noise_multiplier / self.sensitivity)

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair] | None:
        """Dominating pairs of the base, at the multiplier divided by the sensitivity."""
        return self.base.pairs(noise_multiplier / self.sensitivity)

    def rdp(self, noise_multiplier: float) -> Floats:
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

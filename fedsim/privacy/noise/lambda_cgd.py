"""DP-lambda-CGD: a part of the last round's noise is taken away again in the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.noise.base import NoiseDraws, NoiseState
from fedsim.privacy.noise.correlated import Array, Toeplitz
from fedsim.registry import register


@register("noise", "lambda-cgd")
@dataclass(frozen=True)
class LambdaCGD(Toeplitz):
    """Noise ``Z_t - lambda Z_(t-1)``: nothing is kept, the last round's draws are regenerated.

    C is Toeplitz with the powers of lambda, which is the one coefficient, in [0, 1)
    (arXiv 2601.22334).
    """

    name: ClassVar[str] = "lambda-cgd"

    def fitted(self, participation: Participation) -> Self:
        """The same, with the lambda of the least error of sums over rounds, to 0.001."""
        if self.coefficients:
            return replace(self, participation=participation)
        best = min(range(1000), key=lambda n: _error(n / 1000, participation))
        return replace(self, coefficients=f"{best / 1000:g}", participation=participation)

    @property
    def _lambda(self) -> float:
        try:
            number = float(self.coefficients)
        except ValueError:
            number = -1.0
        if not 0 <= number < 1:
            raise FedsimError(
                f"noise.coefficients is {self.coefficients!r}; with noise.name = '{self.name}' it "
                "must be lambda, a number from 0 up to 1 (not included)."
            )
        return number

    def series(self, rounds: int) -> Array:
        """Powers of lambda."""
        return np.asarray(self._lambda ** np.arange(rounds))

    @property
    def bands(self) -> int:
        """All rounds are coupled, unless lambda is 0."""
        return self.plan.rounds if self._lambda else 1

    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's draws less lambda of the last round's."""
        noise = draws()
        if draws.round > 1 and self._lambda:
            noise = noise - self._lambda * draws(1)
        return noise, state


@lru_cache(maxsize=4096)
def _error(number: float, participation: Participation) -> float:
    """Mean square error of the plan's sums over rounds, at a multiplier of 1."""
    noise = LambdaCGD(1.0, coefficients=str(number))
    later = (participation.rounds - 1) / 2 * (1 - number) ** 2
    return noise.sensitivity(participation) ** 2 * (1 + later)

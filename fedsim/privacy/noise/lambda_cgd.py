"""DP-lambda-CGD: each round subtracts a part of the previous round's draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedsim.array_types import Floats
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.noise.base import NoiseDraws, NoiseState
from fedsim.privacy.noise.correlated import Toeplitz
from fedsim.registry import register


@register("noise", "lambda-cgd")
@dataclass(frozen=True)
class LambdaCGD(Toeplitz):
    """Noise ``Z_t - lambda Z_(t-1)``, without state: the previous round's draws are regenerated.

    ``C^-1`` has ones on its diagonal and -lambda below it, so that C is Toeplitz with the powers
    of lambda, which is the one coefficient, in [0, 1) (arXiv 2601.22334).
    """

    name: ClassVar[str] = "lambda-cgd"
    form: ClassVar[str] = "lambda, a number from 0 to 1"

    def best_coefficients(self, participation: Participation) -> str:
        """The lambda, to 0.001, with the least error."""
        # As lambda grows the error falls and then rises: bisect on the sign of its slope.
        low, high = 0, 999
        while low < high:
            middle = (low + high) // 2
            noise, next_noise = (
                self.with_coefficients(f"{n / 1000:g}", participation) for n in (middle, middle + 1)
            )
            low, high = (
                (low, middle) if noise.error(1.0) <= next_noise.error(1.0) else (middle + 1, high)
            )
        return f"{low / 1000:g}"

    def are_coefficients(self, numbers: Sequence[float]) -> bool:
        """Whether they are a single number from 0 to 1."""
        return super().are_coefficients(numbers) and len(numbers) == 1

    @property
    def _lambda(self) -> float:
        return self.coefficient_values()[0]

    def series(self, rounds: int) -> Floats:
        """First column of C: powers of lambda, ``[rounds]``."""
        return np.asarray(self._lambda ** np.arange(rounds))

    @property
    def bands(self) -> int:
        """Number of bands: C couples all rounds, unless lambda is 0."""
        return self.known_participation.rounds if self._lambda else 1

    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's draws minus lambda times the previous round's; there is no state."""
        noise = draws()
        if draws.round > 1 and self._lambda:
            noise.add_(draws(1), alpha=-self._lambda)
        return noise, state

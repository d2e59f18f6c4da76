"""Banded inverse square root: a round's noise combines the draws of the last few rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np

from fedsim.privacy.laws.base import Participation
from fedsim.privacy.noise.base import NoiseDraws, NoiseState
from fedsim.privacy.noise.correlated import Array, Toeplitz, solved, text_of
from fedsim.registry import register
from fedsim.settings import Ge

MOST_DRAWS = 64
"""The most rounds whose draws are combined, where the number is chosen automatically."""


@register("noise", "bisr")
@dataclass(frozen=True)
class BISR(Toeplitz):
    """``N_t = Z_t - d_1 Z_(t-1) - d_2 Z_(t-2) - ...``, without state: draws are regenerated.

    The first column of ``C^-1`` is the first few coefficients of ``(1 - x)^(1/2)`` (Kalinin et al.
    2025), which need no optimisation. Each of them costs one vector of draws a round.
    """

    name: ClassVar[str] = "bisr"
    form: ClassVar[str] = (
        "1, and then the share of each earlier round's draws that is subtracted: numbers from 0 to "
        "1, together at most 1"
    )

    draws: Annotated[int, Ge(0)] = 0
    """How many rounds' draws the noise of one round combines; 0 for the best power of 2."""

    def best_coefficients(self, participation: Participation) -> str:
        """Coefficients for the number of draws (a power of 2) with the least error."""
        # More draws leave less noise in long sums, but raise the sensitivity: try powers of 2.
        powers = [1 << k for k in range(7) if 1 << k <= min(participation.rounds, MOST_DRAWS)]
        candidates = [
            self.with_coefficients(text_of(root_of(draws)), participation)
            for draws in ([self.draws] if self.draws else powers)
        ]
        return min(candidates, key=lambda noise: noise.error(1.0)).coefficients

    def valid(self, numbers: Sequence[float]) -> bool:
        """Whether they are 1, then d_1, d_2, ..., whose sum is at most 1."""
        # With c_j = sum_k d_k c_(j-k), a sum of the d_k of at most 1 keeps all of C in [0, 1].
        return super().valid(numbers) and numbers[0] == 1 and sum(numbers[1:]) <= 1

    def series(self, rounds: int) -> Array:
        """First column of C, ``[rounds]``: that of the inverse matrix is known, and inverted."""
        inverse = np.zeros(rounds)
        numbers = self.numbers()[:rounds]
        inverse[: len(numbers)] = numbers
        inverse[1:] *= -1
        return solved(inverse, np.eye(1, rounds)[0])

    @property
    def bands(self) -> int:
        """Number of bands: C couples all rounds, unless noise consists of its own round's draws.

        It is ``C^-1`` that is banded.
        """
        return self.known_participation.rounds if len(self.numbers()) > 1 else 1

    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's draws minus parts of the last few rounds' draws; there is no state."""
        noise = draws()
        for age, number in enumerate(self.numbers()[1 : draws.round], start=1):
            noise.add_(draws(age), alpha=-number)
        return noise, state


@lru_cache(maxsize=64)
def root_of(draws: int) -> tuple[float, ...]:
    """Absolute values of the first ``draws`` coefficients of ``(1 - x)^(1/2)``."""
    steps = np.arange(1, draws)
    return (1.0, *np.cumprod(np.abs(2 * steps - 3) / (2 * steps)).tolist())

"""Buffered linear Toeplitz noise: some decaying buffers stand for all earlier rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.noise.base import NoiseDraws, NoiseState
from fedsim.privacy.noise.correlated import Array, Toeplitz, text_of
from fedsim.registry import register
from fedsim.settings import Doc, Ge, Le

WANTED = "pairs of a buffer's decay and weight, from 0 to 1, weights together at most 1"


@register("noise", "blt")
@dataclass(frozen=True)
class BLT(Toeplitz):
    """``N_t = Z_t - w_1 S_1 - ... - w_m S_m``, and then each ``S_i`` becomes ``th_i S_i + N_t``.

    C is Toeplitz with ``c_j = w_1 th_1^(j-1) + ... + w_m th_m^(j-1)``; decays and weights minimise
    the mean square error of sums over rounds (McMahan et al. 2024). It keeps m vectors, and is good
    for any number of rounds.
    """

    name: ClassVar[str] = "blt"

    buffers: Annotated[
        int, Ge(1), Le(4), Doc("The most vectors to keep; more than 2 gain next to nothing.")
    ] = 2

    def fitted(self, participation: Participation) -> Self:
        """The same, with the decays and weights of the least error."""
        if self.coefficients:
            return replace(self, participation=participation)
        tried = [
            replace(self, coefficients=text_of(numbers), participation=participation)
            for numbers in (best_buffers(participation, n + 1) for n in range(self.buffers))
        ]
        # The fewest that are as good as all of them: each is a vector of the model's size.
        least = min(noise.error(1.0) for noise in tried)
        return next(noise for noise in tried if noise.error(1.0) <= least * (1 + 1e-4))

    def _buffers(self) -> list[tuple[float, float]]:
        numbers = self._numbers(WANTED)
        decays, weights = numbers[::2], numbers[1::2]
        if len(decays) != len(weights) or sum(weights) > 1 + 1e-9:
            raise FedsimError(
                f"noise.coefficients is {self.coefficients!r}; with noise.name = '{self.name}' it "
                f"must be {WANTED}."
            )
        return list(zip(decays, weights, strict=True))

    def series(self, rounds: int) -> Array:
        """1, and then sums of powers of the decays."""
        decays, weights = np.array(self._buffers()).T
        series = np.ones(rounds)
        series[1:] = (weights[:, None] * decays[:, None] ** np.arange(rounds - 1)).sum(0)
        return series

    @property
    def bands(self) -> int:
        """All rounds are coupled."""
        return self.known_participation.rounds

    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's draws less parts of the buffers, which are kept."""
        noise, buffers = draws(), self._buffers()
        for index, (_, weight) in enumerate(buffers):
            if state:
                noise.add_(state[str(index)], alpha=-weight)
        return noise, {
            str(index): decay * state[str(index)] + noise if state else noise
            for index, (decay, _) in enumerate(buffers)
        }


@lru_cache(maxsize=64)
def best_buffers(participation: Participation, buffers: int) -> tuple[float, ...]:
    """Decays and weights in turn, of the least error that several searches find."""
    from scipy.optimize import minimize

    def pairs(free: Array) -> Array:
        """Decays in (0, 1), and weights whose sum is, so that the series falls."""
        parts = 1 / (1 + np.exp(-free))
        # Each weight is a part of what those before it have left of 1.
        left = np.cumprod(np.concatenate([[1.0], 1 - parts[buffers:]]))
        return np.stack([parts[:buffers], parts[buffers:] * left[:-1]], axis=1)

    def loss(free: Array) -> float:
        noise = BLT(1.0, coefficients=" ".join(map(repr, pairs(free).ravel().tolist())))
        variance = noise.variances(participation.rounds).mean()
        return float(np.log(noise.sensitivity(participation)) + np.log(variance) / 2)

    starts = [
        np.array([*np.linspace(slowest, 0.0, buffers), *np.full(buffers, weight)])
        for slowest, weight in ((2.0, 0.5), (4.0, -1.0))
    ]
    optima = [
        minimize(loss, start, method="L-BFGS-B", options={"maxiter": 100}) for start in starts
    ]
    best = pairs(min(optima, key=lambda result: float(result.fun)).x)
    return tuple(best[np.argsort(-best[:, 0])].ravel().tolist())

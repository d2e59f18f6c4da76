"""Buffered linear Toeplitz noise: a few decaying buffers summarise all earlier rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np

from fedsim.array_types import Floats
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.noise.base import NoiseDraws, NoiseState
from fedsim.privacy.noise.correlated import Toeplitz, format_coefficients
from fedsim.registry import register
from fedsim.settings import Ge, Le


@register("noise", "blt")
@dataclass(frozen=True)
class BLT(Toeplitz):
    """``N_t = Z_t - w_1 S_1 - ... - w_m S_m``, after which ``S_i`` becomes ``th_i S_i + N_t``.

    C is Toeplitz with ``c_j = w_1 th_1^(j-1) + ... + w_m th_m^(j-1)``; decays and weights minimise
    the mean square error of sums over rounds (McMahan et al. 2024). The state is m vectors, for any
    number of rounds.
    """

    name: ClassVar[str] = "blt"
    form: ClassVar[str] = (
        "pairs of a buffer's decay and weight, from 0 to 1, weights together at most 1"
    )

    buffers: Annotated[int, Ge(1), Le(4)] = 2
    """The largest number of buffers, each a vector of the model's size; more than 2 gain next to
    nothing."""

    def best_coefficients(self, participation: Participation) -> str:
        """Decays and weights with the least error."""
        candidates = [
            self.with_coefficients(
                format_coefficients(best_buffers(participation, n + 1)), participation
            )
            for n in range(self.buffers)
        ]
        # The fewest buffers that are as good as the best: each is a vector of the model's size.
        min_error = min(noise.error(1.0) for noise in candidates)
        return next(
            noise.coefficients for noise in candidates if noise.error(1.0) <= min_error * (1 + 1e-4)
        )

    def are_coefficients(self, numbers: Sequence[float]) -> bool:
        """Whether they are pairs of a decay and a weight, with weights together at most 1."""
        are_pairs = len(numbers) % 2 == 0 and sum(numbers[1::2]) <= 1 + 1e-9
        return super().are_coefficients(numbers) and are_pairs

    def _buffers(self) -> list[tuple[float, float]]:
        """(decay, weight) of each buffer."""
        numbers = self.coefficient_values()
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def series(self, rounds: int) -> Floats:
        """First column of C: 1, then the weighted sums of powers of the decays, ``[rounds]``."""
        decays, weights = np.array(self._buffers()).T
        series = np.ones(rounds)
        series[1:] = (weights[:, None] * decays[:, None] ** np.arange(rounds - 1)).sum(0)
        return series

    @property
    def bands(self) -> int:
        """Number of bands: C couples all rounds."""
        return self.known_participation.rounds

    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's draws minus the weighted buffers; the state is the updated buffers."""
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
    """Alternating decays and weights with the least error that several searches find."""
    from scipy.optimize import minimize

    def pairs(free: Floats) -> Floats:
        """Decays and weights ``[buffers, 2]`` from unconstrained numbers ``[2 * buffers]``.

        Decays are in (0, 1), weights positive with a sum below 1. The series 1, c_1, c_2, ... then
        falls, as the formula for the sensitivity assumes.
        """
        parts = 1 / (1 + np.exp(-free))
        # Stick breaking: each weight is a part of what the weights before it leave of 1.
        remainders = np.cumprod(np.concatenate([[1.0], 1 - parts[buffers:]]))
        return np.stack([parts[:buffers], parts[buffers:] * remainders[:-1]], axis=1)

    def loss(free: Floats) -> float:
        # All digits (repr), not those of `format_coefficients`: rounding would hide the
        # slope, which is taken from finite differences.
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

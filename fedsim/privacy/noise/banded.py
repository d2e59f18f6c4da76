"""Banded matrix factorisation: each round subtracts parts of the last few rounds' noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self

import numpy as np

from fedsim.array_types import Floats
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.noise.base import NoiseDraws, NoiseState
from fedsim.privacy.noise.correlated import (
    Toeplitz,
    format_coefficients,
    prefix_sum_factors,
    solve_toeplitz,
)
from fedsim.registry import register
from fedsim.settings import Ge, NotAllowedError, Text

MAX_BANDS = 64
"""The most bands by default: the state has a vector of the model's size for each but one."""
AUTO = -1
"""Internal value of ``bands`` where a config says ``auto``."""


def _read_bands(value: object) -> int:
    if value == "auto":
        return AUTO
    if type(value) is not int or value < 0:
        raise NotAllowedError("a whole number of at least 0, or 'auto'")
    return value


def _write_bands(bands: int) -> int | str:
    return "auto" if bands == AUTO else bands


@register("noise", "banded")
@dataclass(frozen=True)
class Banded(Toeplitz):
    """``N_t = Z_t - c_1 N_(t-1) - ... - c_(b-1) N_(t-b+1)``: C has b bands.

    Coefficients minimise the mean square error of sums over rounds (BandMF, Choquette-Choo et al.
    2023). With at most as many bands as rounds from one participation of a client to the next,
    sampling within groups amplifies. The state is ``b - 1`` vectors.
    """

    name: ClassVar[str] = "banded"
    form: ClassVar[str] = "the first column of C: 1, and then numbers from 0 to 1"

    bands: Annotated[int, Ge(AUTO), Text(_read_bands, _write_bands)] = 0
    """How many bands C has; 0 for the separation of the cohort's rounds, at most 64; 'auto' for as
    many, with as many groups of a cyclic cohort, as give the least error."""

    def fit(self, participation: Participation) -> Self:
        """This noise with the coefficients that have the least error.

        Raises
        ------
        FedsimError
            If the number of bands is "auto", or differs from the number of coefficients.
        """
        if self.bands == AUTO:
            raise FedsimError(
                "noise.bands is 'auto'; only a config, which has the cohort too, can choose them: "
                "it must be a number."
            )
        noise = super().fit(participation)
        bands = len(noise.coefficient_values())
        if self.coefficients and self.bands not in (0, bands):
            raise FedsimError(
                f"noise.bands is {self.bands}, and noise.coefficients has {bands} numbers; leave "
                "one of them out."
            )
        return replace(noise, bands=bands)

    def best_coefficients(self, participation: Participation) -> str:
        """First column of C with the least error: `bands` numbers, at most one for each round."""
        bands = self.bands or min(participation.separation, MAX_BANDS)
        return format_coefficients(
            best_bands(participation.rounds, min(bands, participation.rounds))
        )

    def are_coefficients(self, numbers: Sequence[float]) -> bool:
        """Whether they begin with 1, and are from 0 to 1."""
        return super().are_coefficients(numbers) and numbers[0] == 1

    def series(self, rounds: int) -> Floats:
        """First column of C: the coefficients, then zeros, ``[rounds]``."""
        numbers = self.coefficient_values()
        series = np.zeros(rounds)
        series[: len(numbers)] = numbers[:rounds]
        return series

    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's draws minus parts of the last rounds' noise; the state is that noise."""
        # The state is a ring: round t is at t modulo the lags, in the place of round t - lags,
        # which this round is the last to use.
        noise, numbers = draws(), self.coefficient_values()
        lags = len(numbers) - 1
        for age, number in enumerate(numbers[1 : draws.round], start=1):
            noise.add_(state[str((draws.round - age) % lags)], alpha=-number)
        return noise, {**state, str(draws.round % lags): noise} if lags else state


@lru_cache(maxsize=64)
def best_bands(rounds: int, bands: int) -> tuple[float, ...]:
    """Coefficients, the first 1, that minimise ``|c|^2`` times the mean variance of sums.

    ``|c|`` is the sensitivity of one participation, so that the product is the squared error at a
    given privacy cost. Each coefficient is a part in (0, 1) of the one before: the series falls,
    and its inverse stays bounded.
    """
    from scipy.optimize import minimize

    # A draw of age a is in the sums of all later rounds, with factors[a] each: its square
    # counts (rounds - a) times in the mean over rounds.
    weights = np.arange(rounds, 0, -1) / rounds

    def loss(logits: Floats) -> tuple[float, Floats]:
        """Logarithm of the product, and its gradient by the logits of the parts."""
        parts = 1 / (1 + np.exp(-logits))
        series = np.zeros(rounds)
        series[:bands] = np.cumprod([1.0, *parts])
        factors = prefix_sum_factors(series)
        norm, variance = float(series @ series), float(weights @ np.square(factors))
        # Gradient of the variance by the series, by the adjoint method: with C b = 1 and
        # C^T a = dV/db, dV/dc_j = -a^T (dC/dc_j) b, and dC/dc_j shifts b down by j.
        adjoint = solve_toeplitz(series, 2 * weights * factors, transposed=True)
        by_series = -np.array([adjoint[j:] @ factors[: rounds - j] for j in range(bands)])
        by_series = by_series / variance + 2 * series[:bands] / norm
        # Part k is a factor of coefficients k, k + 1, ...: sum their gradients from the end. The
        # derivative of log(part) by its logit is 1 - part.
        tails = np.cumsum((by_series * series[:bands])[::-1])[::-1][1:]
        return np.log(norm) + np.log(variance), tails * (1 - parts)

    if bands == 1:
        return (1.0,)
    # Start at the coefficients of (1 - x)^(-1/2), the square root of the matrix of prefix sums
    # (optimal for a single participation, without bands), slightly damped.
    steps = np.arange(1, bands)
    start = (2 * steps - 1) / (2 * steps) * 0.98
    optimum = minimize(
        loss, np.log(start / (1 - start)), jac=True, method="L-BFGS-B", options={"maxiter": 500}
    )
    return (1.0, *np.cumprod(1 / (1 + np.exp(-optimum.x))).tolist())

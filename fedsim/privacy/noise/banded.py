"""Banded matrix factorisation: noise that is coupled to that of the last few rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self

import numpy as np

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.noise.base import NoiseDraws, NoiseState
from fedsim.privacy.noise.correlated import Array, Toeplitz, remaining, solved, text_of
from fedsim.registry import register
from fedsim.settings import Doc, Ge, NotAllowedError, Text

MOST_BANDS = 64
"""Bands by default: each is a vector of the model's size that is kept."""
AUTO = -1
"""The number of bands where a config says ``auto``."""
WANTED = "the first column of C: 1, and then numbers from 0 to 1"


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
    2023). With no more bands than rounds from one participation to the next, sampling within
    groups amplifies. It keeps ``b - 1`` vectors.
    """

    name: ClassVar[str] = "banded"

    bands: Annotated[
        int,
        Ge(AUTO),
        Text(_read_bands, _write_bands),
        Doc(
            "How many bands C has; 0 for the separation of the cohort's rounds, at most 64; 'auto' "
            "for as many, with as many groups of a cyclic cohort, as give the least error."
        ),
    ] = 0

    def fitted(self, participation: Participation) -> Self:
        """The same, with the coefficients of the least error.

        Raises
        ------
        FedsimError
            If the number of bands is left to a config.
        """
        if self.bands == AUTO:
            raise FedsimError(
                "noise.bands is 'auto'; only a config, which has the cohort too, can choose them: "
                "it must be a number."
            )
        if self.coefficients:
            bands, declared = len(self._numbers(WANTED)), self.bands
            if declared not in (0, bands):
                raise FedsimError(
                    f"noise.bands is {declared}, and noise.coefficients has {bands} numbers; leave "
                    "one of them out."
                )
            return replace(self, bands=bands, participation=participation)
        bands = self.bands or min(participation.separation, MOST_BANDS)
        series = best_bands(participation.rounds, min(bands, participation.rounds))
        return replace(
            self, bands=len(series), coefficients=text_of(series), participation=participation
        )

    def series(self, rounds: int) -> Array:
        """The coefficients, and zeros."""
        numbers = self._numbers(WANTED)
        if numbers[0] != 1:
            raise FedsimError(
                f"noise.coefficients begins with {numbers[0]:g}; with noise.name = '{self.name}' "
                f"it must be {WANTED}."
            )
        series = np.zeros(rounds)
        series[: len(numbers)] = numbers[:rounds]
        return series

    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's draws less parts of the noise of the last rounds, which is kept."""
        noise, numbers = draws(), self._numbers(WANTED)
        lags = len(numbers) - 1
        for age, number in enumerate(numbers[1 : draws.round], start=1):
            noise.add_(state[str((draws.round - age) % lags)], alpha=-number)
        return noise, {**state, str(draws.round % lags): noise} if lags else state


@lru_cache(maxsize=64)
def best_bands(rounds: int, bands: int) -> tuple[float, ...]:
    """The coefficients, 1 first, of the least ``|c|^2`` times mean variance of sums over rounds.

    Each is a part in (0, 1) of the one before: the series falls, and its inverse stays bounded.
    """
    from scipy.optimize import minimize

    weights = np.arange(rounds, 0, -1) / rounds

    def loss(logits: Array) -> tuple[float, Array]:
        parts = 1 / (1 + np.exp(-logits))
        series = np.zeros(rounds)
        series[:bands] = np.cumprod([1.0, *parts])
        left = remaining(series)
        norm, variance = float(series @ series), float(weights @ np.square(left))
        # The derivative of the variance by the series, by the adjoint of C b = 1.
        adjoint = solved(series, 2 * weights * left, transposed=True)
        by_series = -np.array([adjoint[j:] @ left[: rounds - j] for j in range(bands)])
        by_series = by_series / variance + 2 * series[:bands] / norm
        # A part enters its own coefficient and all later ones.
        tails = np.cumsum((by_series * series[:bands])[::-1])[::-1][1:]
        return np.log(norm) + np.log(variance), tails * (1 - parts)

    if bands == 1:
        return (1.0,)
    # From the square root of the sums' own matrix, damped.
    steps = np.arange(1, bands)
    start = (2 * steps - 1) / (2 * steps) * 0.98
    optimum = minimize(
        loss, np.log(start / (1 - start)), jac=True, method="L-BFGS-B", options={"maxiter": 500}
    )
    return (1.0, *np.cumprod(1 / (1 + np.exp(-optimum.x))).tolist())

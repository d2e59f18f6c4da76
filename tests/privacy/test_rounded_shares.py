"""Shares of noise that clients round each for itself cost no more than one Gaussian."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedsim.federation.aggregation.shares import missing_share, share_multiplier
from fedsim.privacy import Accountant, Event
from fedsim.privacy.laws import FullLaw
from fedsim.privacy.losses import gaussian_epsilon

DELTA = 1e-5


def rounded(std: float) -> np.ndarray:
    """Probabilities of a normal number rounded to a whole one, from far below 0 to as far above."""
    reach = math.ceil(14 * std) + 2
    edges = np.arange(-reach, reach + 2) - 0.5
    # Of the tail that is nearer: differences of tails do not cancel.
    upper, lower = norm.sf(edges / std), norm.cdf(edges / std)
    return np.where(edges[:-1] > 0, upper[:-1] - upper[1:], lower[1:] - lower[:-1])


def epsilon(probabilities: np.ndarray, shift: int) -> float:
    """Of whole-number noise on a sum that one row moves by so many units, at `DELTA`."""
    with_row = np.concatenate([np.zeros(shift), probabilities])
    without = np.concatenate([probabilities, np.zeros(shift)])
    return brentq(
        lambda e: np.maximum(0.0, with_row - math.exp(e) * without).sum() - DELTA, 0.1, 30
    )


@pytest.mark.parametrize(
    ("units", "one", "ten"),
    [
        (1, 4.182416, 2.829861),
        (2, 4.345105, 3.995654),
        (4, 4.377166, 4.250409),
        (16, 4.374894, 4.368296),
        (64, 4.377097, 4.376642),
    ],
)
def test_rounded_shares_cost_no_more_than_the_gaussian_that_is_charged(units, one, ten) -> None:
    """A bound of so many units, and in all as much noise; fedsim's own bound has 2^30 of them."""
    assert epsilon(rounded(units), units) == pytest.approx(one, abs=2e-5)
    share = rounded(units / math.sqrt(10))
    together = share
    for _ in range(9):
        together = np.convolve(together, share)
    assert epsilon(together, units) == pytest.approx(ten, abs=2e-5)
    charged = Accountant([Event(noise_multiplier=1.0, law=FullLaw())]).epsilon(DELTA)
    assert max(one, ten) < charged == pytest.approx(4.377178, abs=1e-5)


@pytest.mark.parametrize(
    ("missing", "colluding", "server", "outsider"),
    [
        (0, 0, 4.3772, 4.3772),
        (10, 0, 4.6530, 4.3772),
        (0, 10, 4.6530, 4.6530),
        (10, 10, 4.9833, 4.6530),
        (30, 10, 5.8998, None),
    ],
)
def test_missing_and_known_shares_cost_what_is_left_of_the_noise(
    missing, colluding, server, outsider
) -> None:
    """Of 100 shares; the server knows what it has added for the missing ones."""
    share = share_multiplier(1.0, 100)
    left = share * math.sqrt(100 - missing - colluding)
    assert gaussian_epsilon(1 / left, DELTA) == pytest.approx(server, abs=1e-4)
    if outsider is not None:
        topped_up = math.hypot(left, math.sqrt(missing_share(100, 100 - missing)))
        assert gaussian_epsilon(1 / topped_up, DELTA) == pytest.approx(outsider, abs=1e-4)

"""Rényi accounting, by dp-accounting: beside the loss distributions, and alone for
cohorts of a fixed size, which they do not cover."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = [
    "fixed_rdp",
    "gaussian_rdp",
    "poisson_rdp",
    "rdp_delta",
    "rdp_epsilon",
]

Array = npt.NDArray[np.float64]

ORDERS = np.array(
    [*np.arange(1.1, 10.95, 0.1).round(1), *range(11, 65), 80, 96, 128, 192, 256, 512, 1024]
)
# Sampling without replacement is bounded at whole orders and interpolated between them;
# beyond 64 its bound costs more time than it ever gains.
WHOLE_ORDERS = np.arange(2, 65)


@lru_cache(maxsize=4096)
def poisson_rdp(rate: float, noise_multiplier: float) -> Array:
    """RDP of a Poisson-sampled Gaussian at `ORDERS`, add-remove."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(ORDERS)
    with _without_warnings():
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier)))
    return np.asarray(accountant.rdp, dtype=np.float64)


def gaussian_rdp(mu: float) -> Array:
    """RDP at `ORDERS` of a Gaussian whose sensitivity is ``mu`` standard deviations."""
    return np.asarray(ORDERS * mu**2 / 2)


@lru_cache(maxsize=4096)
def fixed_rdp(size: int, population: int, noise_multiplier: float) -> Array:
    """RDP at `ORDERS` of a Gaussian on ``size`` of ``population`` without replacement.

    Replace-one. dp-accounting's bound (Wang, Balle & Kasiviswanathan 2019) takes the noise
    in units of the sensitivity of the *change*, which is 2C: it is given z/2, not z.
    """
    from dp_accounting import GaussianDpEvent, NeighboringRelation
    from dp_accounting.dp_event import SampledWithoutReplacementDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(WHOLE_ORDERS, NeighboringRelation.REPLACE_ONE)
    with _without_warnings():
        accountant.compose(
            SampledWithoutReplacementDpEvent(
                population, size, GaussianDpEvent(noise_multiplier / 2)
            )
        )
    # (order - 1) * rdp is convex in the order: a chord is an upper bound.
    cumulants = np.concatenate([[0.0], (WHOLE_ORDERS - 1) * accountant.rdp])
    chord = np.interp(ORDERS, np.concatenate([[1], WHOLE_ORDERS]), cumulants, right=np.inf)
    return np.asarray(chord / (ORDERS - 1))


def rdp_epsilon(rdp: Array, delta: float) -> float:
    """Epsilon of a curve at `ORDERS`."""
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(ORDERS, rdp, delta)[0])


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Let dp-accounting leave out orders whose series does not converge, without a word.

    absl, by which it warns, gives the root logger a handler where that has none: from then on
    every line of others' loggers, Flower's among them, would be shown twice.
    """
    absl, root, silent = logging.getLogger("absl"), logging.getLogger(), logging.NullHandler()
    level = absl.level
    absl.setLevel(logging.ERROR)
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)
        absl.setLevel(level)


def rdp_delta(rdp: Array, epsilon: float) -> float:
    """Delta of a curve at `ORDERS`."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    return float(compute_delta(ORDERS, rdp, epsilon)[0])

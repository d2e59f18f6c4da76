"""What one release shows of a row: closed forms, Rényi curves, and pairs of distributions.

A *dominating pair* of a release is two distributions, its result with the worst row and without
it, such that no other neighbours are easier to distinguish. Its privacy loss is the logarithm of
their density ratio. `fedsim.privacy.pld` composes pairs; Rényi curves are simply added.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr, ndtri

Array = npt.NDArray[np.float64]

ORDERS = np.array(
    [*np.arange(1.1, 10.95, 0.1).round(1), *range(11, 65), 80, 96, 128, 192, 256, 512, 1024]
)
"""Orders of all Rényi curves here."""

# Mass cut off each tail of one release; of that, what could be a large loss is counted as an
# infinite one. Over 10^8 releases it is below 1e-13 together, far below any delta that is asked.
RELEASE_TAIL = 1e-22

MOST_MU = 1e9
"""Beyond it neither epsilon nor delta of a Gaussian can be told from infinity and 1 in floats."""


# A Gaussian without amplification, in closed form. Any composition of such is one Gaussian of
# mu = sqrt(sum 1/z_j^2), whose curve is delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)
# (Balle & Wang, "Improving the Gaussian Mechanism for Differential Privacy", 2018, theorem 8).


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Smallest delta at ``epsilon >= 0`` of a Gaussian of sensitivity ``mu`` stds."""
    if mu == 0:
        return 0.0
    upper = ndtr(mu / 2 - epsilon / mu)
    lower = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return max(0.0, float(upper - lower))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon at ``delta``, to 1e-12 relative, rounded up; infinite beyond `MOST_MU`."""
    if mu > MOST_MU:
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    return bisected(lambda epsilon: gaussian_delta(mu, epsilon) <= delta, 1e-12)[1]


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest ``mu`` that is (epsilon, delta)-private, to 1e-12 relative, rounded down."""
    return bisected(lambda mu: gaussian_delta(mu, epsilon) > delta, 1e-12)[0]


def bisected(
    is_enough: Callable[[float], bool],
    tolerance: float,
    most: float = math.inf,
    start: float = 1.0,
) -> tuple[float, float]:
    """Two numbers from 0 and close together: the first is not enough, and the second is.

    Parameters
    ----------
    is_enough : callable
        False up to some number, and True beyond it.
    tolerance : float
        Relative.
    most : float
        Beyond it infinity is the second number.
    start : float
        Where it is looked for first, 0 or above.
    """
    low, high = 0.0, start
    while not is_enough(high):
        low, high = high, 2 * high or 1e-3
        if high > most:
            return low, math.inf
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if not low < middle < high:  # no number is between them
            break
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low, high


def gaussian_rdp(mu: float) -> Array:
    """RDP at `ORDERS` of a Gaussian whose sensitivity is ``mu`` standard deviations."""
    return np.asarray(ORDERS * mu**2 / 2)


def rdp_epsilon(rdp: Array, delta: float) -> float:
    """Epsilon of a curve at `ORDERS`."""
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(ORDERS, rdp, delta)[0])


def rdp_delta(rdp: Array, epsilon: float) -> float:
    """Delta of a curve at `ORDERS`."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    return float(compute_delta(ORDERS, rdp, epsilon)[0])


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep dp-accounting quiet where it leaves out orders whose series does not converge.

    absl, by which it warns, gives the root logger a handler where that has none: from then on
    every line of other loggers, Flower's among them, would be shown twice.
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


class DominatingPair(ABC):
    """One direction of a release: its distribution ``upper`` on one side, ``lower`` on the other.

    Subclasses are frozen dataclasses; equal ones are accounted for once.
    """

    @abstractmethod
    def ends(self) -> tuple[float, float]:
        """The least and the largest finite loss, but for negligible mass (`RELEASE_TAIL`)."""

    @abstractmethod
    def std(self, *, upper: bool = False) -> float:
        """Standard deviation of the loss under ``lower``, or under ``upper``."""

    @abstractmethod
    def masses(self, grid: Array) -> tuple[Array, Array]:
        """Mass of ``upper`` and ``lower`` at losses below, between and above the grid's points.

        The grid covers `ends`; above its last point is only what counts as an infinite loss.
        Each is ``[len(grid) + 1]``.
        """


@dataclass(frozen=True)
class SampledGaussian(DominatingPair):
    """A Poisson-sampled Gaussian, the row removed: rate ``q`` in (0, 1], noise multiplier ``z``.

    ``upper`` is ``(1 - q) N(0, z^2) + q N(1, z^2)`` and ``lower`` is ``N(0, z^2)``.
    """

    rate: float
    noise_multiplier: float

    @property
    def both(self) -> tuple[DominatingPair, DominatingPair]:
        """This, and the row added."""
        return self, Reversed(self)

    def ends(self) -> tuple[float, float]:
        """The least and the largest finite loss, but for negligible mass."""
        reach = -self.noise_multiplier * float(ndtri(RELEASE_TAIL))
        low, high = self._loss(np.array([-reach, 1 + reach]))
        return float(low), float(high)

    def std(self, *, upper: bool = False) -> float:
        """Standard deviation of the loss under ``lower``, or under ``upper``; by quadrature."""
        q, z = self.rate, self.noise_multiplier
        x = np.linspace(-9.0, 9.0, 4001)
        weight = np.exp(-(x**2) / 2)
        if upper:
            x, weight = np.append(x, x + 1 / z), np.append((1 - q) * weight, q * weight)
        return _weighted_std(self._loss(x * z), weight)

    def _loss(self, x: Array) -> Array:
        """log of (upper density / lower density) at ``x``; increasing."""
        q, z = self.rate, self.noise_multiplier
        exponent = (2 * x - 1) / (2 * z**2)
        if q == 1:
            return exponent
        return np.asarray(np.logaddexp(math.log1p(-q), math.log(q) + exponent))

    def masses(self, grid: Array) -> tuple[Array, Array]:
        """Mass of ``upper`` and ``lower`` at losses below, between and above the grid's points."""
        q, z = self.rate, self.noise_multiplier
        # The loss increases with x, so that the mass between two grid points is that between the x
        # at which it reaches them. It never falls to log(1 - q): there x is -inf. For q = 1 it is
        # linear, and q = 1 put into the other formula would be 0 / 0.
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            if q == 1:
                x = grid * z**2 + 0.5
            else:
                x = 0.5 + z**2 * (grid + np.log(-np.expm1(math.log1p(-q) - grid)) - math.log(q))
        x = np.where(np.isnan(x), -np.inf, x)
        lower, shifted = _normal_masses(x / z), _normal_masses((x - 1) / z)
        return ((1 - q) * lower + q * shifted if q < 1 else shifted), lower


def _normal_masses(points: Array) -> Array:
    """Standard normal mass left of, between and right of ``points``: ``[len + 1]``.

    Differences are taken in the nearer tail, so that small masses keep their digits.
    """
    edges = np.concatenate([[-np.inf], points, [np.inf]])
    lower, upper = edges[:-1], edges[1:]
    in_upper_tail = lower > 0
    return np.asarray(
        np.where(in_upper_tail, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))
    )


@dataclass(frozen=True)
class Reversed(DominatingPair):
    """A pair with its two distributions in each other's place."""

    pair: DominatingPair

    def ends(self) -> tuple[float, float]:
        """The least and the largest finite loss, but for negligible mass."""
        low, high = self.pair.ends()
        return -high, -low

    def std(self, *, upper: bool = False) -> float:
        """Standard deviation of the loss under ``lower``, or under ``upper``."""
        return self.pair.std(upper=not upper)

    def masses(self, grid: Array) -> tuple[Array, Array]:
        """Mass of ``upper`` and ``lower`` at losses below, between and above the grid's points."""
        upper, lower = self.pair.masses(-grid[::-1])
        return lower[::-1], upper[::-1]


class AtomicPair(DominatingPair):
    """A pair that has few finite losses, each with a mass of its own."""

    @abstractmethod
    def _atoms(self) -> tuple[Array, Array, Array]:
        """Finite losses, ascending, and the masses of ``upper`` and ``lower`` at each."""

    def std(self, *, upper: bool = False) -> float:
        """Standard deviation of the loss under ``lower``, or under ``upper``."""
        losses, of_upper, of_lower = self._atoms()
        return _weighted_std(losses, of_upper if upper else of_lower)

    def _sums(self, places: npt.NDArray[np.intp], size: int) -> list[Array]:
        """Masses of ``upper`` and ``lower`` by these places of the atoms, ``[size]`` each."""
        return [np.bincount(places, mass, size).astype(float) for mass in self._atoms()[1:]]


def _weighted_std(values: Array, weight: Array) -> float:
    mean = weight @ values / weight.sum()
    return math.sqrt(float(weight @ (values - mean) ** 2 / weight.sum()))


@dataclass(frozen=True)
class DiscretePair(AtomicPair):
    """A pair by the distribution of its loss, which is all that matters of it.

    Attributes
    ----------
    start : int
    step : float
        Losses are ``(start + i) * step``.
    probs : tuple of float
        Mass of ``upper`` at each; that of ``lower`` is ``exp(-loss)`` of it.
    infinite : float
        Mass of ``upper`` that ``lower`` does not have.
    """

    start: int
    step: float
    probs: tuple[float, ...]
    infinite: float

    def _atoms(self) -> tuple[Array, Array, Array]:
        probs = np.array(self.probs)
        losses = (self.start + np.arange(len(probs), dtype=np.float64)) * self.step
        return losses, probs, probs * np.exp(-losses)

    def distributions(self) -> tuple[Array, Array, Array]:
        """All losses, infinite ones among them, and their masses of ``upper`` and ``lower``."""
        losses, probs, others = self._atoms()
        upper = np.concatenate([[0.0], probs, [self.infinite]])
        lower = np.concatenate([[max(0.0, 1.0 - others.sum())], others, [0.0]])
        losses = np.concatenate([[-np.inf], losses, [np.inf]])
        return losses, upper / upper.sum(), lower / lower.sum()

    def ends(self) -> tuple[float, float]:
        """The least and the largest finite loss, but for negligible mass."""
        losses, *_ = self._atoms()
        return float(losses[0]), float(losses[-1])

    def masses(self, grid: Array) -> tuple[Array, Array]:
        """Mass of ``upper`` and ``lower`` at losses below, between and above the grid's points."""
        losses, *_ = self._atoms()
        # Rounding may put the largest loss beyond the last point, where it would count as infinite.
        places = np.minimum(np.searchsorted(grid, losses), len(grid) - 1)
        upper, lower = self._sums(places, len(grid) + 1)
        upper[-1] += self.infinite
        return upper, lower

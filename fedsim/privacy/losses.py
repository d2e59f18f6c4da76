"""Privacy loss of a single release: closed forms, Rényi curves and dominating pairs.

A *dominating pair* of a release is two distributions (its result with a worst-case row and without
it) that are at least as easy to distinguish as any two neighbours. The privacy loss is the
logarithm of their density ratio. `fedsim.privacy.pld` composes pairs; Rényi curves simply add up.
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

from fedsim.array_types import Floats

ORDERS = np.array(
    [*np.arange(1.1, 10.95, 0.1).round(1), *range(11, 65), 80, 96, 128, 192, 256, 512, 1024]
)
"""Orders of every Rényi curve in this package."""

# Mass cut off each tail of one release. Where the tail holds large losses its mass counts as an
# infinite loss. Over 10^8 releases it adds up to less than 1e-13, far below any delta in use.
RELEASE_TAIL = 1e-22

MAX_MU = 1e9
"""Beyond it epsilon and delta of a Gaussian are infinity and 1 in floating point."""


# A Gaussian without amplification, in closed form. Any composition of them is one Gaussian of
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
    """Smallest epsilon at ``delta``, to 1e-12 relative, rounded up; infinite beyond `MAX_MU`."""
    if mu > MAX_MU:
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    return bisect_interval(lambda epsilon: gaussian_delta(mu, epsilon) <= delta, 1e-12)[1]


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest ``mu`` that is (epsilon, delta)-private, to 1e-12 relative, rounded down."""
    return bisect_interval(lambda mu: gaussian_delta(mu, epsilon) > delta, 1e-12)[0]


def bisect_interval(
    is_enough: Callable[[float], bool],
    tolerance: float,
    most: float = math.inf,
    start: float = 1.0,
) -> tuple[float, float]:
    """Bracket by bisection the threshold from which on ``is_enough`` is True.

    Parameters
    ----------
    is_enough : callable
        False below some number, True above it.
    tolerance : float
        Relative width of the bracket.
    most : float
        Limit of the search; if the threshold is above it, the upper end is infinite.
    start : float
        First number to try, 0 or more.

    Returns
    -------
    tuple of float
        The bracket: a number that is not enough (or 0), and one that is.
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


def gaussian_rdp(mu: float) -> Floats:
    """RDP at `ORDERS` of a Gaussian whose sensitivity is ``mu`` standard deviations."""
    return np.asarray(ORDERS * mu**2 / 2)


def rdp_epsilon(rdp: Floats, delta: float) -> float:
    """Epsilon at ``delta`` of a Rényi curve at `ORDERS`."""
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(ORDERS, rdp, delta)[0])


def rdp_delta(rdp: Floats, epsilon: float) -> float:
    """Delta at ``epsilon`` of a Rényi curve at `ORDERS`."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    return float(compute_delta(ORDERS, rdp, epsilon)[0])


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence dp-accounting's warnings about orders that it skips, since their series diverge.

    It warns through absl, which adds a handler to the root logger if that has none; every line of
    other loggers, Flower's among them, would then be shown twice. Hence the temporary handler.
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
    """Dominating pair of one direction of a release: the distributions ``upper`` and ``lower``.

    The loss is ``log(upper / lower)``. Subclasses are frozen dataclasses; results are cached by
    equal pairs.
    """

    @abstractmethod
    def loss_range(self) -> tuple[float, float]:
        """The least and the largest finite loss, up to negligible mass (`RELEASE_TAIL`)."""

    @abstractmethod
    def std(self, *, upper: bool = False) -> float:
        """Standard deviation of the loss under ``lower``, or under ``upper``."""

    @abstractmethod
    def masses(self, grid: Floats) -> tuple[Floats, Floats]:
        """Masses of ``upper`` and ``lower`` below, between and above the grid's points.

        The grid is one of losses and covers `ends`: all mass above its last point counts as an
        infinite loss.

        Returns
        -------
        tuple of float64 ``[len(grid) + 1]``
        """


@dataclass(frozen=True)
class SampledGaussian(DominatingPair):
    """Pair of a Poisson-sampled Gaussian, for removing a row: rate ``q`` in (0, 1], multiplier z.

    ``upper`` is ``(1 - q) N(0, z^2) + q N(1, z^2)`` and ``lower`` is ``N(0, z^2)``.
    """

    rate: float
    noise_multiplier: float

    @property
    def both_directions(self) -> tuple[DominatingPair, DominatingPair]:
        """Both directions: this pair, and that of adding the row."""
        return self, Reversed(self)

    def loss_range(self) -> tuple[float, float]:
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

    def _loss(self, x: Floats) -> Floats:
        """log of (upper density / lower density) at ``x``; increasing."""
        q, z = self.rate, self.noise_multiplier
        exponent = (2 * x - 1) / (2 * z**2)
        if q == 1:
            return exponent
        return np.asarray(np.logaddexp(math.log1p(-q), math.log(q) + exponent))

    def masses(self, grid: Floats) -> tuple[Floats, Floats]:
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
        lower, shifted = normal_masses(x / z), normal_masses((x - 1) / z)
        return ((1 - q) * lower + q * shifted if q < 1 else shifted), lower


def normal_masses(points: Floats) -> Floats:
    """Standard normal mass left of, between and right of ``points``: ``[len(points) + 1]``.

    Differences are taken in the nearer tail: in the upper one both values of ``ndtr`` are close to
    1, and their difference would have lost all digits.
    """
    edges = np.concatenate([[-np.inf], points, [np.inf]])
    lower, upper = edges[:-1], edges[1:]
    in_upper_tail = lower > 0
    return np.asarray(
        np.where(in_upper_tail, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))
    )


@dataclass(frozen=True)
class Reversed(DominatingPair):
    """A pair with its two distributions swapped: the other direction. Losses change their sign."""

    pair: DominatingPair

    def loss_range(self) -> tuple[float, float]:
        """The least and the largest finite loss, but for negligible mass."""
        low, high = self.pair.loss_range()
        return -high, -low

    def std(self, *, upper: bool = False) -> float:
        """Standard deviation of the loss under ``lower``, or under ``upper``."""
        return self.pair.std(upper=not upper)

    def masses(self, grid: Floats) -> tuple[Floats, Floats]:
        """Mass of ``upper`` and ``lower`` at losses below, between and above the grid's points."""
        upper, lower = self.pair.masses(-grid[::-1])
        return lower[::-1], upper[::-1]


class AtomicPair(DominatingPair):
    """Base of pairs whose loss is discrete: finitely many finite losses, each with some mass."""

    @abstractmethod
    def _atoms(self) -> tuple[Floats, Floats, Floats]:
        """Finite losses, ascending, and the masses of ``upper`` and ``lower`` at each."""

    def std(self, *, upper: bool = False) -> float:
        """Standard deviation of the loss under ``lower``, or under ``upper``."""
        losses, of_upper, of_lower = self._atoms()
        return _weighted_std(losses, of_upper if upper else of_lower)

    def _sums(self, places: npt.NDArray[np.intp], size: int) -> list[Floats]:
        """Masses of ``upper`` and ``lower``, summed by the atoms' places in a grid: ``[size]``."""
        return [np.bincount(places, mass, size).astype(float) for mass in self._atoms()[1:]]


def _weighted_std(values: Floats, weight: Floats) -> float:
    mean = weight @ values / weight.sum()
    return math.sqrt(float(weight @ (values - mean) ** 2 / weight.sum()))


@dataclass(frozen=True)
class DiscretePair(AtomicPair):
    """A pair given by the distribution of its loss alone, which determines its privacy.

    Attributes
    ----------
    start : int
    step : float
        Finite losses are ``(start + i) * step``.
    probs : tuple of float
        Mass of ``upper`` at each finite loss; ``lower`` has ``exp(-loss)`` times as much.
    infinite : float
        Mass of ``upper`` at the loss infinity, where ``lower`` has none.
    """

    start: int
    step: float
    probs: tuple[float, ...]
    infinite: float

    def _atoms(self) -> tuple[Floats, Floats, Floats]:
        probs = np.array(self.probs)
        losses = (self.start + np.arange(len(probs), dtype=np.float64)) * self.step
        return losses, probs, probs * np.exp(-losses)

    def distributions(self) -> tuple[Floats, Floats, Floats]:
        """All losses, the infinite ones included, with the masses of ``upper`` and ``lower``."""
        losses, probs, lower_probs = self._atoms()
        upper = np.concatenate([[0.0], probs, [self.infinite]])
        lower = np.concatenate([[max(0.0, 1.0 - lower_probs.sum())], lower_probs, [0.0]])
        losses = np.concatenate([[-np.inf], losses, [np.inf]])
        return losses, upper / upper.sum(), lower / lower.sum()

    def loss_range(self) -> tuple[float, float]:
        """The least and the largest finite loss, but for negligible mass."""
        losses, *_ = self._atoms()
        return float(losses[0]), float(losses[-1])

    def masses(self, grid: Floats) -> tuple[Floats, Floats]:
        """Mass of ``upper`` and ``lower`` at losses below, between and above the grid's points."""
        losses, *_ = self._atoms()
        # Rounding may put the largest loss beyond the last point, where it would count as infinite.
        places = np.minimum(np.searchsorted(grid, losses), len(grid) - 1)
        upper, lower = self._sums(places, len(grid) + 1)
        upper[-1] += self.infinite
        return upper, lower

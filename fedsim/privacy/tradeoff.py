"""The trade-off curve of a claim: the error rates of any attack that distinguishes neighbours.

An (epsilon, delta) pair is one point of what a composition of events guarantees. All pairs
together say that at a false-positive rate ``a`` any attack misses at least ``f(a)`` (Dong, Roth &
Su, "Gaussian Differential Privacy", 2022). Everything here is rounded in the direction that
keeps it true: ``f`` down, the advantage and mu up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr, ndtri

from fedsim.privacy.accountant import SMALLEST_PLD_DELTA, Accountant
from fedsim.privacy.events import Event
from fedsim.privacy.losses import Array, bisected

# A Gaussian's closed form loses its last digits in the special functions.
ROUNDING = 1e-12
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class TradeOff:
    """Every false negative rate that a claim allows.

    Guarantee: each line ``1 - delta - e^epsilon a`` and ``e^-epsilon (1 - delta - a)`` lies
    below the true curve for a valid (epsilon, delta), so their maximum does, however few
    points there are (Kairouz, Oh & Viswanath 2015).

    Attributes
    ----------
    epsilons, deltas : float64 ``[points]``
        Valid pairs, epsilon ascending from 0; empty where nothing is claimed.
    exact_mu : float or None
        Set where the claim is that of one Gaussian, which has a closed form.
    """

    epsilons: Array = field(repr=False)
    deltas: Array = field(repr=False)
    exact_mu: float | None = None

    def __call__(self, false_positives: npt.ArrayLike) -> Array:
        """Least false negative rate at each false positive rate, same shape."""
        alarms = np.asarray(false_positives, dtype=np.float64)
        if self.exact_mu is not None:
            missed = ndtr(ndtri(1 - alarms) - self.exact_mu)
            return np.asarray(np.maximum(missed - ROUNDING, 0.0))
        if not len(self.epsilons):
            return np.zeros_like(alarms)
        # Of thousands of lines one is the highest at a point, and found by bisection. Each of them
        # lies below the true curve, so that rounding in the search does no harm.
        grown, deltas, falls = self._hull
        starts = deltas[:-1] + falls * grown[:-1]
        steep = np.searchsorted(-falls, -alarms)
        flat = np.searchsorted(-starts, alarms - 1)
        lines = np.maximum(
            1 - deltas[steep] - grown[steep] * alarms, (1 - deltas[flat] - alarms) / grown[flat]
        )
        return np.asarray(np.maximum(lines, 0.0))

    @cached_property
    def _hull(self) -> tuple[Array, Array, Array]:
        """``x = e^epsilon`` and delta of the lower convex hull's points, and its chords' falls.

        Their lines are the highest somewhere, both those of slope -x and those of slope -1/x. Of
        the former the next one takes over at a false-positive rate that equals the fall of delta's
        chord; of the latter, at 1 less the chord's value at x = 0.
        """
        # Beyond the largest exponent all are one point.
        grown, first = np.unique(
            np.exp(np.minimum(self.epsilons, LARGEST_EXPONENT)), return_index=True
        )
        points: list[tuple[float, float]] = []
        falls: list[float] = [math.inf]  # of the chord that ends at each of them
        for x, delta in zip(grown.tolist(), self.deltas[first].tolist(), strict=True):
            while points:
                fall = (points[-1][1] - delta) / (x - points[-1][0])
                if fall < falls[-1]:
                    falls.append(fall)
                    break
                points.pop()
                falls.pop()
            points.append((x, delta))
        x, deltas = np.array(points).T
        return x, deltas, np.array(falls[1:])

    @property
    def advantage(self) -> float:
        """``delta(0)``: the most that true positives can exceed false ones by (total variation)."""
        return float(self.deltas[0]) if len(self.deltas) else 1.0

    @cached_property
    def mu(self) -> float:
        """Smallest mu whose Gaussian curve lies nowhere above this one, to 1e-6, rounded up.

        A valid bound for deltas above 1e-10, unlike the mu of the central limit theorem.
        Infinite where nothing is claimed.
        """
        if self.exact_mu is not None:
            return self.exact_mu
        if not len(self.epsilons):
            return math.inf
        usable = self.deltas > SMALLEST_PLD_DELTA
        epsilons, deltas = self.epsilons[usable], self.deltas[usable]
        if not len(epsilons):
            return 0.0
        return bisected(lambda mu: _dominates(mu, epsilons, deltas), 1e-7, most=1e6)[1]

    def sentence(self) -> str:
        """The curve at three false positive rates, in words."""
        missed = self([0.01, 0.05, 0.1])
        at_one, at_five, at_ten = (f"{math.floor(1000 * rate) / 10:g} %" for rate in missed)
        return (
            "At a false-positive rate of 1 %, any membership-inference attack misses at least "
            f"{at_one}; at 5 %, {at_five}; at 10 %, {at_ten}."
        )


def tradeoff(events: Iterable[Event] | Accountant) -> TradeOff:
    """The curve of these events together; zero everywhere where one has no guarantee.

    Examples
    --------
    >>> curve = tradeoff([Event(noise_multiplier=10.0, count=100)])
    >>> round(float(curve(0.05)), 4), round(curve.mu, 6)
    (0.7405, 1.0)
    """
    accountant = events if isinstance(events, Accountant) else Accountant(events)
    epsilons, deltas = accountant.profile()
    return TradeOff(epsilons, deltas, accountant.gaussian_mu)


def _dominates(mu: float, epsilons: Array, deltas: Array) -> bool:
    """Whether ``delta_mu(e) >= delta(e)`` for every e between the first and last epsilon.

    Between two epsilons the claim lies below the chord in ``x = e^epsilon``, both curves being
    convex in x, and the chord exceeds the Gaussian curve most where their slopes agree: where
    ``Phi(-mu/2 - e/mu)`` is the chord's fall.
    """
    if (_gaussian_deltas(mu, epsilons) < deltas).any():
        return False
    if len(epsilons) == 1:
        return True
    lower, upper = epsilons[:-1], epsilons[1:]
    width = np.expm1(upper - lower)
    fall = (deltas[:-1] - deltas[1:]) / width
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        slopes = np.minimum(fall * np.exp(-lower), 1.0)
        steepest = np.clip(mu * (-mu / 2 - ndtri(slopes)), lower, upper)
    chord = deltas[:-1] - fall * np.expm1(steepest - lower)
    return bool((_gaussian_deltas(mu, steepest) >= chord).all())


def _gaussian_deltas(mu: float, epsilons: Array) -> Array:
    upper = ndtr(mu / 2 - epsilons / mu)
    lower = np.exp(epsilons + log_ndtr(-mu / 2 - epsilons / mu))
    return np.asarray(np.maximum(upper - lower, 0.0))

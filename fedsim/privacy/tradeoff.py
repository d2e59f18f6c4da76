"""Trade-off curves: the error rates of any attack that tries to distinguish neighbours.

An (epsilon, delta) pair is one point of the guarantee of a composition. All pairs together say
that at a false-positive rate ``a`` any attack has a false-negative rate of at least ``f(a)``
(Dong, Roth & Su, "Gaussian Differential Privacy", 2022). Results are rounded so that the claim
stays true: ``f`` down, the advantage and mu up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr, ndtri

from fedsim.arguments import check_arguments
from fedsim.array_types import Floats
from fedsim.privacy.accountant import MIN_PLD_DELTA, Accountant
from fedsim.privacy.events import Event
from fedsim.privacy.losses import bisect_interval

# A Gaussian's closed form loses its last digits in the special functions.
CURVE_TOLERANCE = 1e-12
MAX_EXPONENT = 700.0
FEW = 0.05
"""Fraction of people below which a statement says "nobody", and above the rest "everybody"."""
CERTAIN = 1e-9
"""False-positive rate of an attack that is certain."""


@dataclass(frozen=True)
class TradeOff:
    """Lower bound on the false-negative rate of any attack, by its false-positive rate.

    Guarantee: for a valid (epsilon, delta) the lines ``1 - delta - e^epsilon a`` and
    ``e^-epsilon (1 - delta - a)`` lie below the true curve, and so does the maximum of all such
    lines, however few points there are (Kairouz, Oh & Viswanath 2015).

    Attributes
    ----------
    epsilons, deltas : float64 ``[points]``
        Valid pairs, epsilon ascending from 0; empty where nothing is guaranteed.
    exact_mu : float or None
        ``mu``, if the composition is a single Gaussian, whose curve has a closed form.
    """

    epsilons: Floats = field(repr=False)
    deltas: Floats = field(repr=False)
    exact_mu: float | None = None

    def __call__(self, false_positives: npt.ArrayLike) -> Floats:
        """Least false negative rate at each false positive rate, same shape."""
        rates = np.asarray(false_positives, dtype=np.float64)
        if self.exact_mu is not None:
            false_negatives = ndtr(-ndtri(rates) - self.exact_mu)  # 1 - rates rounds
            return np.asarray(np.maximum(false_negatives - CURVE_TOLERANCE, 0.0))
        if not len(self.epsilons):
            return np.zeros_like(rates)
        # The highest of thousands of lines at each point, by bisection. Any of them is a valid
        # lower bound, so that a wrong choice by rounding is safe.
        grown, deltas, falls = self._hull
        starts = deltas[:-1] + falls * grown[:-1]
        steep = np.searchsorted(-falls, -rates)
        flat = np.searchsorted(-starts, rates - 1)
        lines = np.maximum(
            1 - deltas[steep] - grown[steep] * rates, (1 - deltas[flat] - rates) / grown[flat]
        )
        return np.asarray(np.maximum(lines, 0.0))

    @cached_property
    def _hull(self) -> tuple[Floats, Floats, Floats]:
        """``x = e^epsilon`` and delta of the lower convex hull's points, and the chords' slopes.

        Each point of the hull has a line of slope -x and one of slope -1/x that is the highest
        somewhere. Among the former, the next line takes over at a false-positive rate equal to the
        negative slope (fall) of the chord between the two points; among the latter, at 1 less the
        chord's value at x = 0.
        """
        # Epsilons above the largest exponent become one point.
        grown, first = np.unique(np.exp(np.minimum(self.epsilons, MAX_EXPONENT)), return_index=True)
        points: list[tuple[float, float]] = []
        falls: list[float] = [math.inf]  # of the chord that ends at each point
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
        """``delta(0)``, total variation: the most by which true exceed false positives (rates)."""
        return float(self.deltas[0]) if len(self.deltas) else 1.0

    @cached_property
    def mu(self) -> float:
        """Smallest mu whose Gaussian curve is nowhere above this one, to 1e-6, rounded up.

        A valid bound for deltas above 1e-10, unlike the mu of the central limit theorem.
        Infinite where nothing is guaranteed.
        """
        if self.exact_mu is not None:
            return self.exact_mu
        if not len(self.epsilons):
            return math.inf
        usable = self.deltas > MIN_PLD_DELTA
        epsilons, deltas = self.epsilons[usable], self.deltas[usable]
        if not len(epsilons):
            return 0.0
        return bisect_interval(lambda mu: _dominates(mu, epsilons, deltas), 1e-7, most=1e6)[1]

    def sentence(self) -> str:
        """The curve at three false-positive rates, in words; and whether it protects anybody."""
        at_one, at_five, at_ten = (f"{self._missed(rate):g} %" for rate in (0.01, 0.05, 0.1))
        figures = (
            "At a false-positive rate of 1 %, any membership-inference attack misses at least "
            f"{at_one}; at 5 %, {at_five}; at 10 %, {at_ten}."
        )
        return f"{figures} {self._void()}".strip()

    def brief(self) -> str:
        """The curve at a false-positive rate of 1 %, in at most 76 characters."""
        missed = self._missed(0.01)
        if missed >= 100 * (1 - FEW):
            return f"At 1 % false positives any attack misses nearly everybody ({missed:g} %)."
        return self._void() or f"At 1 % false positives any attack misses at least {missed:g} %."

    def _void(self) -> str:
        """A sentence if an attack may find everybody, or some for certain; else empty."""
        if self._missed(0.01) < 100 * FEW:
            return "At 1 % false positives an attack may find everybody: this protects nobody."
        # Of clients who may not be sampled, for example, only the sampled ones are found.
        found = 100 - self._missed(CERTAIN)
        if found > 100 * FEW:
            return f"An attack may find {found:.3g} % of people for certain: this protects nobody."
        return ""

    def _missed(self, false_positives: float) -> float:
        """Least false-negative rate in per cent, rounded down to one decimal."""
        return math.floor(1000 * float(self(false_positives))) / 10


@check_arguments
def tradeoff(events: Iterable[Event] | Accountant) -> TradeOff:
    """Trade-off curve of a composition of events; 0 everywhere if one has no guarantee.

    Examples
    --------
    >>> curve = tradeoff([Event(noise_multiplier=10.0, count=100)])
    >>> round(float(curve(0.05)), 4), round(curve.mu, 6)
    (0.7405, 1.0)
    """
    accountant = events if isinstance(events, Accountant) else Accountant(events)
    epsilons, deltas = accountant.profile()
    return TradeOff(epsilons, deltas, accountant.gaussian_mu)


def _dominates(mu: float, epsilons: Floats, deltas: Floats) -> bool:
    """Whether ``delta_mu(e) >= delta(e)`` for every e between the first and last epsilon.

    Both curves are convex in ``x = e^epsilon``. Between two epsilons the guaranteed delta is below
    the chord, and the chord exceeds the Gaussian curve most where their slopes agree: where
    ``Phi(-mu/2 - e/mu)`` is the chord's negative slope. It suffices to compare there.
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


def _gaussian_deltas(mu: float, epsilons: Floats) -> Floats:
    upper = ndtr(mu / 2 - epsilons / mu)
    lower = np.exp(epsilons + log_ndtr(-mu / 2 - epsilons / mu))
    return np.asarray(np.maximum(upper - lower, 0.0))

"""What one test of an audit found, the limit that decides, and how sure it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import chdtr, chdtrc, log_ndtr, stdtr

Floats = npt.NDArray[np.float64]
Subject = Literal["sampler", "bound", "noise", "plan", "ledger"]
Limit = Callable[[float], str]
"""From a risk to the value beyond which a test refutes at that risk."""
PValueAt = Callable[[int, float], float]
DOUBLINGS, HALVINGS = 60, 50


@dataclass(frozen=True)
class Check:
    """A test of one thing that the claim takes for granted.

    Attributes
    ----------
    subject : "sampler", "bound", "noise", "plan" or "ledger"
        Which of the five things that make a release it is about.
    name : str
    looked_at : str
        At what, and how much of it.
    measured : str
        The statistic that deviates most.
    limit : callable
        From the risk of the test to what the statistic may be: the test refutes exactly where
        ``measured`` lies outside.
    p_value : float
        Probability of a deviation at least as large, if all is as claimed; every comparison that
        the test makes is counted. 0 for what cannot happen at all.
    """

    subject: Subject
    name: str
    looked_at: str
    measured: str
    limit: Limit = field(compare=False)
    p_value: float

    def __str__(self) -> str:
        return f"{self.subject}: {self.name}"

    def refutes(self, risk: float) -> bool:
        """Whether so small a p-value is evidence, where true claims may fail at this rate."""
        return self.p_value <= risk


def invariant(
    subject: Subject, name: str, looked_at: str, broken: str | None, expected: str
) -> Check:
    """A test of something that is true or false: ``broken`` says what was found instead."""
    p = 0.0 if broken else 1.0
    return Check(subject, name, looked_at, broken or expected, lambda _: expected, p)


@dataclass(frozen=True)
class Statistic:
    """Statistics of one kind, each with a distribution of its own if all is as claimed.

    Attributes
    ----------
    words : str
        What a statistic is, with a place for the number: "correlation {}".
    values, p_values : float64 ``[n]``
    p_at : callable
        The p-value that the statistic with some index would have at another value.
    expected : float
        Where the p-value is large; it falls to both sides.
    whole : bool
        Whether values are whole numbers.
    count : int, optional
        How many statistics there were, if the values are only those that deviate most.
    """

    words: str
    values: Floats
    p_values: Floats
    p_at: PValueAt
    expected: float
    whole: bool = False
    count: int | None = None

    def limits(self, index: int, risk: float) -> tuple[float, float]:
        """The least and the largest value at which the statistic does not refute at ``risk``."""
        if self.p_at(index, self.expected) <= risk:
            return self.expected, self.expected
        return self._limit(index, risk, -1.0), self._limit(index, risk, 1.0)

    def _limit(self, index: int, risk: float, sign: float) -> float:
        step = 1.0 if self.whole else max(abs(self.expected), 1e-3)
        inside, outside = 0.0, step
        for _ in range(DOUBLINGS):
            if self.p_at(index, self.expected + sign * outside) <= risk:
                break
            inside, outside = outside, 2 * outside
        else:
            return sign * math.inf
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            refuted = self.p_at(index, self.expected + sign * middle) <= risk
            inside, outside = (inside, middle) if refuted else (middle, outside)
        return self.expected + sign * inside

    def spoken(self, index: int, risk: float) -> str:
        """`limits` in words."""
        low, high = self.limits(index, risk)
        if self.whole:
            low, high = np.ceil(low), np.floor(high)
        if low == -math.inf or (self.whole and low < 0):
            return f"at most {high:.5g}"
        return f"at least {low:.5g}" if high == math.inf else f"{low:.5g} to {high:.5g}"


def statistical(
    subject: Subject, name: str, looked_at: str, comparisons: Sequence[Statistic]
) -> Check:
    """A test of several kinds of statistics, which share its risk equally (Bonferroni).

    Those of one kind share theirs equally, too.
    """
    kinds = [kind for kind in comparisons if kind.values.size]
    if not kinds:
        return invariant(subject, name, looked_at, None, "too few values to compare")
    # How many times its own p-value the test's is.
    factors = [len(kinds) * (kind.count or kind.values.size) for kind in kinds]
    least = [float(kind.p_values.min()) * n for kind, n in zip(kinds, factors, strict=True)]
    which = int(np.argmin(least))
    kind, factor = kinds[which], factors[which]
    index = int(kind.p_values.argmin())
    return Check(
        subject,
        name,
        looked_at,
        kind.words.format(f"{kind.values[index]:.5g}"),
        lambda risk: kind.spoken(index, risk / factor),
        min(1.0, least[which]),
    )


def chi_square(words: str, sums: npt.ArrayLike, degrees: npt.ArrayLike) -> Statistic:
    """Sums of squares of standard normals, shown as their root mean squares."""
    x, k = np.broadcast_arrays(np.asarray(sums, dtype=np.float64).ravel(), np.ravel(degrees))

    def p_at(index: int, ratio: float) -> float:
        return float(chi_square_p(ratio**2 * k[index], k[index])) if ratio > 0 else 0.0

    return Statistic(words, np.sqrt(x / k), chi_square_p(x, k), p_at, 1.0)


def normal(words: str, scores: npt.ArrayLike) -> Statistic:
    """Standard normal scores, in standard errors."""
    values = np.asarray(scores, dtype=np.float64).ravel()
    return Statistic(words, values, normal_p(values), lambda _, x: float(normal_p(x)), 0.0)


def correlations(words: str, r: npt.ArrayLike, n: int) -> Statistic:
    """Correlations of independent pairs of ``n`` normals with known means: Student's t, exact."""

    def p(value: Floats) -> Floats:
        size = np.minimum(np.abs(value), 1.0)
        t = size * math.sqrt(max(n - 1, 1)) / np.sqrt(np.maximum(1 - size**2, 1e-300))
        return np.asarray(2 * stdtr(max(n - 1, 1), -t))

    values = np.asarray(r, dtype=np.float64).ravel()
    return Statistic(words, values, p(values), lambda _, x: float(p(np.asarray(x))), 0.0)


def counts_in_bins(counts: npt.ArrayLike, expected: npt.ArrayLike, words: str = "") -> Statistic:
    """Pearson's statistic of counts ``[..., bins]``."""
    difference = np.asarray(counts, dtype=np.float64) - np.asarray(expected, dtype=np.float64)
    statistics = np.atleast_1d((np.square(difference) / expected).sum(-1))
    degrees = difference.shape[-1] - 1

    def p(x: Floats) -> Floats:
        return np.asarray(chdtrc(degrees, np.maximum(x, 0.0)))

    return Statistic(
        f"chi-square {{}}{words}", statistics, p(statistics),
        lambda _, x: float(p(np.asarray(x))), 0.0,
    )  # fmt: skip


def binomial(
    words: str, counts: npt.ArrayLike, p_of: Callable[[Floats], Floats], expected: float
) -> Statistic:
    """Counts of one distribution, which ``p_of`` gives p-values of."""
    values = np.asarray(counts, dtype=np.float64).ravel()

    def p_at(_: int, count: float) -> float:
        return 0.0 if count < 0 else float(p_of(np.array([round(count)]))[0])

    return Statistic(words, values, p_of(values), p_at, float(round(expected)), whole=True)


def smallest(p_values: npt.ArrayLike) -> float:
    """The p-value of the largest deviation of several comparisons (Bonferroni)."""
    values = np.asarray(p_values, dtype=np.float64)
    return float(min(1.0, values.size * values.min())) if values.size else 1.0


def normal_p(scores: npt.ArrayLike) -> Floats:
    """Two-sided p-values of standard normal scores."""
    return np.asarray(2 * np.exp(log_ndtr(-np.abs(np.asarray(scores, dtype=np.float64)))))


def chi_square_p(values: npt.ArrayLike, degrees: npt.ArrayLike) -> Floats:
    """Two-sided p-values of chi-square statistics: too large and too small both deviate."""
    x, k = np.asarray(values, dtype=np.float64), np.asarray(degrees, dtype=np.float64)
    return np.asarray(np.minimum(1.0, 2 * np.minimum(chdtr(k, x), chdtrc(k, x))))

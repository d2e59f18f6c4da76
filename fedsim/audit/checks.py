"""What a check is, what one finds, and how likely that is by chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import chdtr, chdtrc, log_ndtr, stdtr

from fedsim.privacy.losses import bisected

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Part = Literal["sampler", "bound", "noise", "plan", "ledger"]
PValues = Callable[[Floats, Any], Floats]
"""From values of statistics, and the indices of these statistics, to p-values."""


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes
    ----------
    looked_at : str
        What was examined, and how much of it.
    measured : str
        The statistic that deviates most.
    limit : callable
        From the risk of the check to what the statistic may be: a violation is detected exactly
        where ``measured`` lies outside.
    p_value : float
        Probability of a deviation at least as large, if all is as claimed; every comparison that
        was made is counted. 0 for what cannot happen at all.
    tested : bool
        False where there was too little to compare: ``measured`` says why.
    part, name, cause : str
        Those of its `Check`.
    """

    looked_at: str
    measured: str
    limit: Callable[[float], str] = field(compare=False)
    p_value: float
    tested: bool = True
    part: str = ""
    name: str = ""
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.part}: {self.name}"

    def refutes(self, risk: float) -> bool:
        """Whether so small a p-value is evidence, where true claims may fail at this rate."""
        return self.p_value <= risk


@dataclass(frozen=True)
class Check:
    """One thing that a claim takes for granted, and how an audit tests it.

    Attributes
    ----------
    part : "sampler", "bound", "noise", "plan" or "ledger"
        Which of the five parts of a release it is about.
    name : str
    test : callable
        From a sample to what was found; its docstring says what is tested.
    cause : str
        What a violation most likely means.
    """

    part: Part
    name: str
    test: Callable[..., Finding]
    cause: str

    def find(self, *sample: Any) -> Finding:
        """What the test finds, with the words of this check."""
        return replace(self.test(*sample), part=self.part, name=self.name, cause=self.cause)


def checks_of(part: Part, *rows: tuple[str, Callable[..., Finding], str]) -> tuple[Check, ...]:
    """Checks of one part, each by its name, its test and its cause."""
    return tuple(Check(part, *row) for row in rows)


Gathered = tuple[Callable[[], Any], Iterable[Check]]
"""Gathers a sample, or a tuple of the arguments of tests, or None; and what it is tested by."""


def findings(gathered: Iterable[Gathered], *names: str) -> list[Finding]:
    """What all these checks find, or those of these names; only their samples are gathered."""
    found = []
    for gather, checks in gathered:
        chosen = [check for check in checks if not names or check.name in names]
        sample = gather() if chosen else None
        if sample is not None:
            sample = sample if isinstance(sample, tuple) else (sample,)
            found += [check.find(*sample) for check in chosen]
    return found


def invariant(looked_at: str, broken: str | None, expected: str) -> Finding:
    """What is true or false: ``broken`` says what was found instead of what is expected."""
    return Finding(looked_at, broken or expected, lambda _: expected, 0.0 if broken else 1.0)


def untested(looked_at: str, why: str) -> Finding:
    """Nothing, where there was too little to compare."""
    return replace(invariant(looked_at, None, why), tested=False)


@dataclass(frozen=True)
class Statistic:
    """Statistics of one kind, each with a distribution of its own if all is as claimed.

    Attributes
    ----------
    words : str
        What a statistic is, with a place for the number: "correlation {}".
    values : float64 ``[n]``
    p_values_at : callable
        From values and the indices of their statistics (one, or a slice) to p-values.
    expected : float
        Where the p-value is large; it falls to both sides.
    whole : bool
        Whether values are whole numbers, 0 or more.
    count : int, optional
        How many statistics there were, if the values are only those that deviate most.
    """

    words: str
    values: Floats
    p_values_at: PValues
    expected: float = 0.0
    whole: bool = False
    count: int | None = None

    @cached_property
    def p_values(self) -> Floats:
        """Of each statistic, ``[n]``."""
        return np.asarray(self.p_values_at(self.values, slice(None)))

    def limits(self, index: int, risk: float) -> str:
        """Where the statistic with this index is not evidence at ``risk``, in words."""
        low, high = self._limit(index, risk, -1.0), self._limit(index, risk, 1.0)
        if self.whole:
            low, high = max(math.ceil(low), 0) if low > -math.inf else 0, np.floor(high)
        if high == math.inf:
            return f"at least {low:.5g}"
        if low == -math.inf or (self.whole and low == 0):
            return f"at most {high:.5g}"
        return f"{low:.5g} to {high:.5g}"

    def _limit(self, index: int, risk: float, sign: float) -> float:
        """The value farthest from the expected one, in this direction, that is not evidence."""
        if self._p_value_at(index, self.expected) <= risk:
            return self.expected
        step = 1.0 if self.whole else max(abs(self.expected), 1e-3)
        inside, outside = bisected(
            lambda k: self._p_value_at(index, self.expected + sign * k * step) <= risk, 1e-12, 2e18
        )
        return self.expected + sign * (math.inf if outside == math.inf else inside * step)

    def _p_value_at(self, index: int, value: float) -> float:
        if self.whole and value < 0:
            return 0.0
        at = np.array([round(value) if self.whole else value], dtype=np.float64)
        return float(np.ravel(self.p_values_at(at, index))[0])


def statistical(looked_at: str, *comparisons: Statistic) -> Finding:
    """Several kinds of statistics, which share the risk of a check equally (Bonferroni).

    Those of one kind share theirs equally, too.
    """
    kinds = [kind for kind in comparisons if kind.values.size]
    if not kinds:
        return untested(looked_at, "too few values to compare")
    # How many times its own p-value the check's is.
    factors = [len(kinds) * (kind.count or kind.values.size) for kind in kinds]
    least = [float(kind.p_values.min()) * n for kind, n in zip(kinds, factors, strict=True)]
    which = int(np.argmin(least))
    kind, factor = kinds[which], factors[which]
    index = int(kind.p_values.argmin())
    measured = kind.words.format(f"{kind.values[index]:.5g}")
    return Finding(
        looked_at, measured, lambda risk: kind.limits(index, risk / factor), min(1.0, least[which])
    )


def chi_square(words: str, sums: npt.ArrayLike, degrees: npt.ArrayLike) -> Statistic:
    """Sums of squares of standard normals, shown as their root mean squares; both tails."""
    x, k = np.broadcast_arrays(np.asarray(sums, dtype=np.float64).ravel(), np.ravel(degrees))

    def p(ratios: Floats, index: Any) -> Floats:
        squares = np.square(np.maximum(ratios, 0.0)) * k[index]
        smaller = np.minimum(chdtr(k[index], squares), chdtrc(k[index], squares))
        return np.asarray(np.minimum(1.0, 2 * smaller))

    return Statistic(words, np.sqrt(x / k), p, 1.0)


def normal(words: str, scores: npt.ArrayLike) -> Statistic:
    """Standard normal scores, in standard errors; both tails."""
    values = np.asarray(scores, dtype=np.float64).ravel()
    return Statistic(words, values, lambda x, _: 2 * np.exp(log_ndtr(-np.abs(x))))


def correlations(words: str, r: npt.ArrayLike, n: int) -> Statistic:
    """Correlations of independent pairs of ``n`` normals with known means: Student's t, exact."""
    degrees = max(n - 1, 1)

    def p(value: Floats, _: Any) -> Floats:
        size = np.minimum(np.abs(value), 1.0)
        t = size * math.sqrt(degrees) / np.sqrt(np.maximum(1 - size**2, 1e-300))
        return np.asarray(2 * stdtr(degrees, -t))

    return Statistic(words, np.asarray(r, dtype=np.float64).ravel(), p)


def counts_in_bins(counts: npt.ArrayLike, expected: npt.ArrayLike, words: str = "") -> Statistic:
    """Pearson's statistic of counts ``[..., bins]``."""
    difference = np.asarray(counts, dtype=np.float64) - np.asarray(expected, dtype=np.float64)
    statistics = np.atleast_1d((np.square(difference) / expected).sum(-1))
    degrees = difference.shape[-1] - 1
    return Statistic(
        f"chi-square {{}}{words}", statistics, lambda x, _: chdtrc(degrees, np.maximum(x, 0.0))
    )


def counted(
    words: str, counts: npt.ArrayLike, p_of: Callable[[Floats], Floats], expected: float
) -> Statistic:
    """Counts of one distribution, which ``p_of`` gives p-values of."""
    values = np.asarray(counts, dtype=np.float64).ravel()
    return Statistic(words, values, lambda x, _: p_of(x), float(round(expected)), whole=True)

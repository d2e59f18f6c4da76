"""Checks of an audit, their findings, and the statistics whose p-values decide them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import chdtr, chdtrc, log_ndtr, stdtr

from fedsim.array_types import Floats
from fedsim.privacy.losses import bisect_interval

Part = Literal["sampler", "bound", "noise", "plan", "ledger"]
PValues = Callable[[Floats, Any], Floats]
"""Function from values of statistics, and their indices, to p-values."""


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes
    ----------
    examined : str
        What was examined, and how much of it.
    measured : str
        The most deviating statistic, in words.
    limit : callable
        Allowed values in words, as a function of the check's risk: a violation is detected
        exactly if the measured value is outside.
    p_value : float
        Probability of a deviation at least as large if the claim is true, corrected for all
        comparisons made. 0 for what cannot happen.
    tested : bool
        False if there was too little to compare; ``measured`` says why.
    part, name, cause : str
        Copied from the `Check`.
    """

    examined: str
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
        """Whether the p-value is a violation, if a true claim may be rejected with this risk."""
        return self.p_value <= risk


@dataclass(frozen=True)
class Check:
    """An assumption of a claim, and the test of it.

    Attributes
    ----------
    part : "sampler", "bound", "noise", "plan" or "ledger"
        The part of a release that it is about.
    name : str
    test : callable
        Function from a sample to a finding; its docstring says what is tested.
    cause : str
        Most likely cause of a violation.
    fits : callable
        Whether the test applies to a sample; it is not made on other samples.
    """

    part: Part
    name: str
    test: Callable[..., Finding]
    cause: str
    fits: Callable[..., bool] = lambda *_: True

    def find(self, *sample: Any) -> Finding:
        """Run the test, and label its finding with this check's part, name and cause."""
        return replace(self.test(*sample), part=self.part, name=self.name, cause=self.cause)


def make_checks(
    part: Part,
    *rows: tuple[str, Callable[..., Finding], str],
    fits: Callable[..., bool] = Check.fits,
) -> tuple[Check, ...]:
    """Make checks of one part from rows of name, test and cause, for samples that ``fits``."""
    return tuple(Check(part, *row, fits) for row in rows)


SampleChecks = tuple[Callable[[], Any], Iterable[Check]]
"""A function that gathers a sample (or a tuple of arguments, or None to skip), and its checks."""


def findings(gathered: Iterable[SampleChecks], *names: str) -> list[Finding]:
    """Run all checks, or those with these names; only needed samples are gathered."""
    findings = []
    for gather, checks in gathered:
        chosen = [check for check in checks if not names or check.name in names]
        sample = gather() if chosen else None
        if sample is not None:
            sample = sample if isinstance(sample, tuple) else (sample,)
            findings += [check.find(*sample) for check in chosen if check.fits(*sample)]
    return findings


def invariant(examined: str, fault: str | None, expected: str) -> Finding:
    """Finding of a yes-or-no check; ``fault`` says what was found instead, or is None."""
    return Finding(examined, fault or expected, lambda _: expected, 0.0 if fault else 1.0)


def untested(examined: str, why: str) -> Finding:
    """Finding of a check that could not be made, and why."""
    return replace(invariant(examined, None, why), tested=False)


@dataclass(frozen=True)
class Statistic:
    """Statistics of one kind, each with a known distribution if the claim is true.

    Attributes
    ----------
    words : str
        Description with a place for the number, such as "correlation {}".
    values : float64 ``[n]``
    p_values_at : callable
        Function from values and their indices (an int or a slice) to p-values.
    expected : float
        A value with a large p-value; p-values decrease on both sides of it.
    whole : bool
        Whether values are whole numbers of 0 or more.
    count : int, optional
        Number of statistics compared, if ``values`` has only the most deviating ones.
    """

    words: str
    values: Floats
    p_values_at: PValues
    expected: float = 0.0
    whole: bool = False
    count: int | None = None

    @cached_property
    def p_values(self) -> Floats:
        """p-value of each statistic, ``[n]``."""
        return np.asarray(self.p_values_at(self.values, slice(None)))

    def limits(self, index: int, risk: float) -> str:
        """Values of the statistic at this index that are no violation at ``risk``, in words."""
        low, high = self._limit(index, risk, -1.0), self._limit(index, risk, 1.0)
        if self.whole:
            low, high = max(math.ceil(low), 0) if low > -math.inf else 0, np.floor(high)
        if high == math.inf:
            return f"at least {low:.5g}"
        if low == -math.inf or (self.whole and low == 0):
            return f"at most {high:.5g}"
        return f"{low:.5g} to {high:.5g}"

    def _limit(self, index: int, risk: float, sign: float) -> float:
        """The farthest value from the expected one, in this direction, that is no violation."""
        if self._p_value_at(index, self.expected) <= risk:
            return self.expected
        step = 1.0 if self.whole else max(abs(self.expected), 1e-3)
        inside, outside = bisect_interval(
            lambda k: self._p_value_at(index, self.expected + sign * k * step) <= risk, 1e-12, 2e18
        )
        return self.expected + sign * (math.inf if outside == math.inf else inside * step)

    def _p_value_at(self, index: int, value: float) -> float:
        if self.whole and value < 0:
            return 0.0
        at = np.array([round(value) if self.whole else value], dtype=np.float64)
        return float(np.ravel(self.p_values_at(at, index))[0])


def statistical(examined: str, *comparisons: Statistic) -> Finding:
    """Finding from several kinds of statistics, which share the check's risk equally (Bonferroni).

    Statistics of one kind also share its part of the risk equally.
    """
    kinds = [kind for kind in comparisons if kind.values.size]
    if not kinds:
        return untested(examined, "too few values to compare")
    # Bonferroni factors, from a statistic's p-value to the check's.
    factors = [len(kinds) * (kind.count or kind.values.size) for kind in kinds]
    least = [float(kind.p_values.min()) * n for kind, n in zip(kinds, factors, strict=True)]
    which = int(np.argmin(least))
    kind, factor = kinds[which], factors[which]
    index = int(kind.p_values.argmin())
    measured = kind.words.format(f"{kind.values[index]:.5g}")
    return Finding(
        examined, measured, lambda risk: kind.limits(index, risk / factor), min(1.0, least[which])
    )


def chi_square(words: str, sums: npt.ArrayLike, degrees: npt.ArrayLike) -> Statistic:
    """Sums of squares of standard normals, two-sided; shown as root mean squares."""
    x, k = np.broadcast_arrays(np.asarray(sums, dtype=np.float64).ravel(), np.ravel(degrees))

    def p(ratios: Floats, index: Any) -> Floats:
        squares = np.square(np.maximum(ratios, 0.0)) * k[index]
        smaller = np.minimum(chdtr(k[index], squares), chdtrc(k[index], squares))
        return np.asarray(np.minimum(1.0, 2 * smaller))

    return Statistic(words, np.sqrt(x / k), p, 1.0)


def normal(words: str, scores: npt.ArrayLike) -> Statistic:
    """Standard normal scores, two-sided; shown in standard errors."""
    values = np.asarray(scores, dtype=np.float64).ravel()
    return Statistic(words, values, lambda x, _: 2 * np.exp(log_ndtr(-np.abs(x))))


def correlations(words: str, r: npt.ArrayLike, n: int) -> Statistic:
    """Correlations of ``n`` pairs of independent normals of known means; exact, by Student's t."""
    degrees = max(n - 1, 1)

    def p(value: Floats, _: Any) -> Floats:
        size = np.minimum(np.abs(value), 1.0)
        t = size * math.sqrt(degrees) / np.sqrt(np.maximum(1 - size**2, 1e-300))
        return np.asarray(2 * stdtr(degrees, -t))

    return Statistic(words, np.asarray(r, dtype=np.float64).ravel(), p)


def counts_in_bins(counts: npt.ArrayLike, expected: npt.ArrayLike, words: str = "") -> Statistic:
    """Pearson's chi-square statistic of counts ``[..., bins]``."""
    difference = np.asarray(counts, dtype=np.float64) - np.asarray(expected, dtype=np.float64)
    statistics = np.atleast_1d((np.square(difference) / expected).sum(-1))
    degrees = difference.shape[-1] - 1
    return Statistic(
        f"chi-square {{}}{words}", statistics, lambda x, _: chdtrc(degrees, np.maximum(x, 0.0))
    )


def counted(
    words: str, counts: npt.ArrayLike, p_of: Callable[[Floats], Floats], expected: float
) -> Statistic:
    """Counts of one distribution, whose p-values ``p_of`` computes."""
    values = np.asarray(counts, dtype=np.float64).ravel()
    return Statistic(words, values, lambda x, _: p_of(x), float(round(expected)), whole=True)

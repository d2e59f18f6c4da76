"""Statistics over seeds: means with standard deviations, and differences with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with its confidence interval at 95 %.

    Attributes
    ----------
    mean : float
    error : float
        Standard error of the mean; infinite if there is only one pair.
    pairs : int
        Number of pairs.
    """

    mean: float
    error: float
    pairs: int

    def interval(self, of: int = 1) -> tuple[float, float]:
        """Student's interval, at 95 % for ``of`` such intervals jointly (Bonferroni)."""
        if self.pairs < 2:
            return -np.inf, np.inf
        quantile = float(stats.t.ppf(1 - (1 - LEVEL) / (2 * of), self.pairs - 1))
        return self.mean - quantile * self.error, self.mean + quantile * self.error

    @property
    def low(self) -> float:
        """Lower end of the interval of this difference alone."""
        return self.interval()[0]

    @property
    def high(self) -> float:
        """Upper end of the interval of this difference alone."""
        return self.interval()[1]

    @property
    def positive(self) -> bool | None:
        """Whether the difference is above 0; None if the interval contains 0."""
        return all_ahead([self])

    @property
    def text(self) -> str:
        """The mean and the interval as text."""
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def mean_text(values: Sequence[float]) -> str:
    """The mean and, if there are several values, the standard deviation, as text."""
    mean, deviation = over_seeds(values)
    return f"{mean:.2f} ± {deviation:.2f}" if len(values) > 1 else f"{mean:.2f}"


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (with n - 1; 0 for one value) over seeds."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else 0.0


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """``first - second``, seed by seed.

    Parameters
    ----------
    first, second : sequence of float
        Values of the same seeds in the same order.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean, spread = over_seeds(differences)
    count = len(differences)
    return Difference(mean, spread / np.sqrt(count) if count > 1 else np.inf, count)


def within(differences: Sequence[Difference], low: float, high: float) -> bool | None:
    """Whether k differences all lie between low and high, with at most 5 % error for either answer.

    True if all k intervals at 95 % lie inside: if some difference is really outside, its own
    interval would have to miss it. False if one interval lies outside; here the k intervals must
    hold jointly, so each is at ``1 - 5 % / k``, since the chance that one of k intervals at 95 %
    misses its true value is larger than 5 %. Otherwise None, not decided.
    """
    together = [difference.interval(len(differences)) for difference in differences]
    if any(end < low or start > high for start, end in together):
        return False
    return True if all(low < d.low and d.high < high for d in differences) else None


def all_ahead(differences: Sequence[Difference]) -> bool | None:
    """Whether all differences are above 0; see `within`."""
    return within(differences, 0.0, np.inf)


def listed(differences: Sequence[Difference], names: Iterable[str]) -> str:
    """List differences with their names as text: ``eps 1: +0.07 [+0.02, +0.13]``.

    If an interval is below 0 by itself but not as one of several joint intervals, the joint
    interval is appended: it explains why `all_ahead` does not decide.
    """
    count = len(differences)
    return "; ".join(
        f"{name}: {difference.text}{_together(difference, count)}"
        for name, difference in zip(names, differences, strict=True)
    )


def _together(difference: Difference, of: int) -> str:
    low, high = difference.interval(of)
    below_alone = difference.high < 0 <= high
    return f" (with all {of} together [{low:+.2f}, {high:+.2f}])" if below_alone else ""

"""What seeds say: means with their spread, and differences with an interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and its interval at 95 %.

    Attributes
    ----------
    mean : float
    error : float
        Its standard error; infinite where there is one pair only.
    pairs : int
    """

    mean: float
    error: float
    pairs: int

    def interval(self, of: int = 1) -> tuple[float, float]:
        """Student's interval, at 95 % for all of so many intervals together (Bonferroni)."""
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
        """Upper end of it."""
        return self.interval()[1]

    @property
    def positive(self) -> bool | None:
        """Whether the difference is above 0; None where the interval has 0 inside."""
        return all_ahead([self])

    @property
    def text(self) -> str:
        """The mean and the interval."""
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def mean_text(values: Sequence[float]) -> str:
    """The mean and, of several, the standard deviation."""
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
        Of the same seeds in the same order.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean, spread = over_seeds(differences)
    count = len(differences)
    return Difference(mean, spread / np.sqrt(count) if count > 1 else np.inf, count)


def within(differences: Sequence[Difference], low: float, high: float) -> bool | None:
    """Whether k differences all lie between low and high, with an error of 5 % either way.

    Yes if all k intervals at 95 % lie inside: whichever difference is really outside, its own
    interval alone would have to miss it. No if one interval lies outside, and for that the k
    intervals must hold together: each is at ``1 - 5 % / k``, since one of k intervals at 95 %
    misses its true value more often than one interval does. Otherwise not decided.
    """
    together = [difference.interval(len(differences)) for difference in differences]
    if any(end < low or start > high for start, end in together):
        return False
    return True if all(low < d.low and d.high < high for d in differences) else None


def all_ahead(differences: Sequence[Difference]) -> bool | None:
    """Whether all are above 0; see `within`."""
    return within(differences, 0.0, np.inf)


def agreed(verdicts: Sequence[bool | None]) -> bool | None:
    """The verdict that all readings of a setting come to; not decided where they differ."""
    return verdicts[0] if len(set(verdicts)) == 1 else None


def listed(differences: Sequence[Difference], names: Iterable[str]) -> str:
    """Each with what it is of: ``eps 1: +0.07 [+0.02, +0.13]``.

    Where an interval of several is below 0 by itself, and not with all of them together, the
    latter stands beside it.
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

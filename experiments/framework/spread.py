"""What seeds say: means with their spread, and differences with an interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

__all__ = ["Difference", "all_ahead", "listed", "over_seeds", "paired", "within"]

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and its interval at 95 %.

    Attributes
    ----------
    mean, low, high : float
        The interval is Student's; it is the whole line where there is one pair only.
    """

    mean: float
    low: float
    high: float

    @property
    def positive(self) -> bool | None:
        """Whether the difference is above 0; None where the interval has 0 inside."""
        return True if self.low > 0 else False if self.high < 0 else None

    @property
    def text(self) -> str:
        """The mean and the interval."""
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


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
    if count < 2:
        return Difference(mean, -np.inf, np.inf)
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * spread / np.sqrt(count)
    return Difference(mean, mean - half, mean + half)


def all_ahead(differences: Sequence[Difference]) -> bool | None:
    """Whether all are above 0: no if one is below, undecided if one may be either."""
    signs = [difference.positive for difference in differences]
    return False if False in signs else None if None in signs else True


def within(differences: Sequence[Difference], low: float, high: float) -> bool | None:
    """Whether all lie from low to high: no if an interval is outside, yes if all are inside."""
    if any(difference.low > high or difference.high < low for difference in differences):
        return False
    return True if all(d.low >= low and d.high <= high for d in differences) else None


def listed(differences: Sequence[Difference], names: Iterable[str]) -> str:
    """Each with what it is of: ``eps 1: +0.07 [+0.02, +0.13]``."""
    return "; ".join(
        f"{name}: {difference.text}" for name, difference in zip(names, differences, strict=True)
    )

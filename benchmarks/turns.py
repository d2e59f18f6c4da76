"""Time sides that take turns, and compare their times.

A machine's speed and other load vary from minute to minute, so only sides that take turns can be
compared, turn by turn. The median of the turns' ratios is given with an interval that covers the
true median with a probability of at least 95 %.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb
from statistics import median

CONFIDENCE = 0.95

TurnWork = Callable[[int], object]
"""Does one contender's work in the turn of this number."""


@dataclass(frozen=True)
class Ratio:
    """Median of the turns' ratios, with its confidence interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def in_turns(
    sides: Mapping[str, TurnWork],
    pairs: int,
    *,
    first: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Seconds of each side's turns, which are numbered from ``first`` on; CPU time by default."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(first, first + pairs):
        # The order alternates: the first side of a turn finds the caches as the other left them.
        for name in sides if turn % 2 else reversed(list(sides)):
            began = clock()
            sides[name](turn)
            seconds[name].append(clock() - began)
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> Ratio:
    """Ratio of two sides' times, ours over theirs."""
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    return Ratio(median(ratios), *interval(ratios))


def interval(ordered: list[float]) -> tuple[float, float]:
    """Order statistics that enclose the true median with `CONFIDENCE`, or the outermost ones.

    n values are all on one side of the median with probability ``2 / 2^n``; each step inwards adds
    ``2 comb(n, rank) / 2^n``.
    """
    n, rank, outside = len(ordered), 0, 2 / 2 ** len(ordered)
    while rank < (n - 1) // 2 and outside + 2 * comb(n, rank + 1) / 2**n <= 1 - CONFIDENCE:
        rank += 1
        outside += 2 * comb(n, rank) / 2**n
    return ordered[rank], ordered[n - 1 - rank]

"""Runs that differ in their seeds only, and the mean and deviation of a number over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from fedsim.config import Scalar
from fedsim.privacy.statement import epsilon_marks
from fedsim.reports.charts import Line
from fedsim.runs.metrics import brief, is_share
from fedsim.runs.record import RunRecord

_ROUNDING = 1e-12
"""Largest deviation, relative to the mean, that is put down to rounding and not shown."""


@dataclass(frozen=True)
class Spread:
    """Mean and deviation of a number over runs.

    Attributes
    ----------
    mean : float
    std : float or None
        Sample standard deviation (n - 1); None for a single run.
    count : int
    """

    mean: float
    std: float | None
    count: int

    @classmethod
    def from_values(cls, values: Sequence[float | None]) -> Spread | None:
        """Compute it from values without None; None if there are no others."""
        numbers = [value for value in values if value is not None]
        if not numbers:
            return None
        with np.errstate(invalid="ignore"):  # a number may be infinite
            std = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
            return cls(float(np.mean(numbers)), std, len(numbers))

    def text(self, name: str) -> str:
        """The mean of a metric, and its deviation if the values differ; in percent if shares."""
        percent = is_share(name, [self.mean])
        mean = brief(self.mean, percent)
        if self.std is None or not self.std > _ROUNDING * abs(self.mean):
            return mean
        return f"{mean[:-2]} ± {100 * self.std:.2f} %" if percent else f"{mean} ± {self.std:.2g}"


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in their seeds only.

    Attributes
    ----------
    label : str
        Label that distinguishes it from other groups.
    point : mapping of key to value
        This group's values of the keys in which groups differ.
    records : list of RunRecord
    """

    label: str
    point: Mapping[str, Scalar]
    records: Sequence[RunRecord]

    @property
    def seeds(self) -> set[Scalar]:
        """The seeds of the runs."""
        return {record.config.get("seed", "") for record in self.records}

    @property
    def ended(self) -> Self:
        """The group without runs that failed or are not finished."""
        ends = ("finished", "stopped", "budget")
        return replace(self, records=[r for r in self.records if r.outcome.ended in ends])

    @property
    def marks(self) -> str:
        """Marks that an epsilon of these runs must carry: simulated, declared."""
        columns = ("simulated", "declared")
        return epsilon_marks(*(max(r.last(c) or 0 for r in self.records) for c in columns))

    def spread(self, column: str, *, recent: bool = False) -> Spread | None:
        """A column's last value over the runs that have one, or the mean of its last five."""
        return Spread.from_values(
            [r.recent(column) if recent else r.last(column) for r in self.records]
        )

    def mean_curve(self, column: str, name: str) -> Line:
        """Curve of the mean over the runs, with a band of one standard deviation to each side."""
        by_round: dict[float, list[float]] = {}
        for record in self.records:
            for x, y in zip(*record.curve(column), strict=True):
                by_round.setdefault(x, []).append(y)
        rounds = sorted(by_round)
        spreads = [
            spread for x in rounds if (spread := Spread.from_values(by_round[x])) is not None
        ]
        means = [spread.mean for spread in spreads]
        if len(self.records) < 2:
            return Line(name, rounds, means)
        low = [spread.mean - (spread.std or 0.0) for spread in spreads]
        high = [spread.mean + (spread.std or 0.0) for spread in spreads]
        return Line(name, rounds, means, low, high)

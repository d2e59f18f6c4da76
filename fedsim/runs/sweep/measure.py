"""What runs of a sweep are compared by: a metric, its last evaluations, its spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LAST_EVALUATIONS = 5
"""How many evaluations a figure of a sweep is the mean of."""


@dataclass(frozen=True)
class Measure:
    """What members are compared by.

    Attributes
    ----------
    name : str
        Of a metric, or "loss"; its columns are ``test-name`` and ``validation-name``.
    higher_is_better : bool
    """

    name: str
    higher_is_better: bool


@dataclass(frozen=True)
class Spread:
    """Numbers over seeds.

    Attributes
    ----------
    mean : float
    std : float or None
        The standard deviation of one seed's number (n - 1); None of a single one.
    count : int
    """

    mean: float
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Of so many; None of none."""
        if not values:
            return None
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), std, len(values))


def validated(rows: Sequence[Mapping[str, object]], measure: Measure) -> float | None:
    """The mean of the last five evaluations on examples held out, of the trained model if any."""
    trained = [row for row in rows if int(str(row["round"])) > 0] or rows
    values = numbers_in(trained, f"validation-{measure.name}")
    return float(np.mean(values[-LAST_EVALUATIONS:])) if values else None


def numbers_in(rows: Sequence[Mapping[str, object]], column: str) -> list[float]:
    """The numbers of a column, without the rows that lack it."""
    return [float(str(row[column])) for row in rows if row.get(column) not in (None, "")]

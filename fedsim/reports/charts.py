"""Charts of a page: what is drawn, its words for who does not see it, and the table behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.reports.markup import Markup, inert_json, tag
from fedsim.reports.numbers import brief, size

__all__ = ["Bars", "Heat", "Line", "Lines", "thinned"]

MOST_POINTS = 800
"""Of one line; of more, the lowest and highest of each stretch are drawn."""

_TABLE_ROWS = 12


@dataclass(frozen=True)
class Line:
    """One curve: ``y`` over ``x``, NaN where there is nothing; ``low`` and ``high`` are a band.

    ``reference`` is a line that was not measured: a bound, a budget, a guess.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    reference: bool = False


@dataclass(frozen=True)
class Lines:
    """Curves over one axis.

    They are ``percent`` of a whole, ``counts`` from 0 up, ``bytes``, or in a unit ``square``.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    about: str = ""
    percent: bool = False
    square: bool = False
    counts: bool = False
    bytes: bool = False

    def spec(self) -> dict[str, Any]:
        """What the page's script draws."""
        series = []
        for line in self.lines:
            keep = thinned(line.y, MOST_POINTS)
            columns = {"x": line.x, "y": line.y, "low": line.low, "high": line.high}
            kept = {
                name: [_short(values[i]) for i in keep]
                for name, values in columns.items()
                if values
            }
            series.append({"name": line.name, "reference": line.reference, **kept})
        return {
            "kind": "lines",
            "x": self.x,
            "y": self.y,
            "percent": self.percent,
            "square": self.square,
            "counts": self.counts,
            "bytes": self.bytes,
            "series": series,
        }

    def words(self) -> str:
        """What a reader would say of it."""
        told = [self._course(line) for line in self.lines if not line.reference]
        return f"{self.title}. " + " ".join(told)

    def _course(self, line: Line) -> str:
        real = [(y, x) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
        if not real:
            return f"{line.name}: nothing was measured."
        (first, _), (last, _) = real[0], real[-1]
        (low, where_low), (high, where_high) = min(real), max(real)
        return (
            f"{line.name}: from {self._told(first)} to {self._told(last)}, lowest "
            f"{self._told(low)} at {brief(where_low)}, highest {self._told(high)} at "
            f"{brief(where_high)}."
        )

    def _told(self, value: float | None) -> str:
        return size(value) if self.bytes and value is not None else brief(value, self.percent)

    def table(self) -> Markup:
        """A few points of every curve."""
        names = [self.x, *(line.name for line in self.lines)]
        places = sorted({x for line in self.lines for x in line.x})
        step = max(len(places) - 1, 1) / (_TABLE_ROWS - 1)
        chosen = sorted({round(i * step) for i in range(_TABLE_ROWS)} & set(range(len(places))))
        values = [dict(zip(line.x, line.y, strict=True)) for line in self.lines]
        rows = [
            [brief(places[i]), *(self._told(curve.get(places[i])) for curve in values)]
            for i in chosen
        ]
        return numbers_table(names, rows)


@dataclass(frozen=True)
class Bars:
    """One number a label."""

    title: str
    x: str
    y: str
    labels: Sequence[str]
    values: Sequence[float]
    about: str = ""
    percent: bool = False

    def spec(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {
            "kind": "bars",
            "x": self.x,
            "y": self.y,
            "percent": self.percent,
            "labels": list(self.labels),
            "values": list(self.values),
        }

    def words(self) -> str:
        """What a reader would say of it."""
        if not self.values:
            return f"{self.title}. Nothing."
        most = max(range(len(self.values)), key=lambda i: self.values[i])
        return (
            f"{self.title}. {len(self.values)} bars; the highest is {self.labels[most]} with "
            f"{brief(self.values[most], self.percent)}."
        )

    def table(self) -> Markup:
        """Every bar."""
        rows = [
            [label, brief(value, self.percent)]
            for label, value in zip(self.labels, self.values, strict=True)
        ]
        return numbers_table([self.x, self.y], rows[:200])


@dataclass(frozen=True)
class Heat:
    """A grid of shares, ``values[row][column]`` from 0 to 1, each row with a label.

    With ``ticks`` columns have theirs too, as many as there is room for.
    """

    title: str
    x: str
    y: str
    labels: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    about: str = ""
    ticks: bool = False

    def spec(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {
            "kind": "heat",
            "ticks": self.ticks,
            "x": self.x,
            "y": self.y,
            "labels": list(self.labels),
            "columns": list(self.columns),
            "values": [[round(100 * share) for share in row] for row in self.values],
        }

    def words(self) -> str:
        """What a reader would say of it."""
        return f"{self.title}. {len(self.labels)} rows of {len(self.columns)} shares."

    def table(self) -> Markup:
        """Each row's mean and largest share."""
        rows = [
            [label, f"{sum(row) / max(len(row), 1):.1%}", f"{max(row, default=0):.1%}"]
            for label, row in zip(self.labels, self.values, strict=True)
        ]
        return numbers_table([self.y, "mean share", "largest share"], rows)


Chart = Lines | Bars | Heat


def figure(chart: Chart, identifier: str) -> Markup:
    """A chart with its caption, its words and its table."""
    return tag(
        "figure",
        tag(
            "figcaption",
            tag("h3", chart.title),
            tag("p", chart.about) if chart.about else None,
        ),
        tag(
            "div",
            class_="plot",
            role="img",
            tabindex=0,
            aria_label=chart.words(),
            data_chart=identifier,
        ),
        inert_json(chart.spec(), identifier),
        tag("details", tag("summary", "Numbers"), chart.table()),
        class_="chart",
    )


def numbers_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """A table whose first column names its rows."""
    head = tag("tr", *(tag("th", heading, scope="col") for heading in headings))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
        for row in rows
    ]
    table = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=headings[0])


def thinned(values: Sequence[float], at_most: int) -> list[int]:
    """Positions of the first, the last, and the lowest and highest of every stretch."""
    count = len(values)
    if count <= at_most:
        return list(range(count))
    width = math.ceil(2 * count / (at_most - 2))
    keep = {0, count - 1}
    for start in range(0, count, width):
        stretch = range(start, min(start + width, count))
        real = [i for i in stretch if math.isfinite(values[i])] or stretch
        keep |= {min(real, key=lambda i: values[i]), max(real, key=lambda i: values[i])}
    return sorted(keep)


def _short(value: float) -> float | None:
    """Six digits, which no screen shows the end of; None where there is no number."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")

"""Charts of a page: the data to draw, a text description for screen readers, and a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedsim.privacy.entry import SIMULATED_COHORT
from fedsim.runs.metrics import (
    EXAMPLES,
    QUANTILES,
    brief,
    display_name,
    is_share,
    learning_columns,
    size,
    subject,
)
from fedsim.runs.record import RunRecord

MAX_POINTS = 800
"""Points drawn of one line; of a longer one, the lowest and highest of each stretch are drawn."""

_TABLE_ROWS = 8


@dataclass(frozen=True)
class Cell:
    """A table cell: the displayed text, and the value by which the table is sorted."""

    text: str
    value: float = math.nan


@dataclass(frozen=True)
class PageTable:
    """Rows under headings; the first cell of a row is its label.

    A table with a ``name`` can be sorted by a click on a heading.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    name: str = ""


@dataclass(frozen=True)
class Line:
    """One curve: ``y`` over ``x``, NaN where a value is missing, with a band ``low`` to ``high``.

    ``reference`` marks a line that was not measured: a bound, a budget, random guessing.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    reference: bool = False

    def from_origin(self) -> Line:
        """The line with a point (0, 0) put first."""
        low, high = ([0.0, *band] if band else band for band in (self.low, self.high))
        return replace(self, x=[0.0, *self.x], y=[0.0, *self.y], low=low, high=high)


@dataclass(frozen=True)
class Lines:
    """Curves over a common x axis.

    Their values are shares (``percent``), ``counts`` from 0 up, ``bytes``, or in the unit square
    (``square``). The y axis of other values starts near the lowest one, or at 0 (``from_zero``).
    In a picture, the x axis may be logarithmic (``log_x``).
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
    from_zero: bool = False
    log_x: bool = False

    def spec(self) -> dict[str, Any]:
        """The chart as JSON data for the page's script."""
        flags = ("x", "y", "percent", "square", "counts", "bytes", "from_zero")
        series = []
        for line in self.lines:
            keep = thinned(line.y, MAX_POINTS)
            columns = {"x": line.x, "y": line.y, "low": line.low, "high": line.high}
            shown = {
                name: [_short(values[i]) for i in keep]
                for name, values in columns.items()
                if values
            }
            series.append({"name": line.name, "reference": line.reference, **shown})
        xs = series[0]["x"] if series else []  # written once, not in every line that has the same
        series = [{k: v for k, v in s.items() if k != "x" or v != xs} for s in series]
        chart = {flag: getattr(self, flag) for flag in flags}
        return {"kind": "lines", "xs": xs, "series": series, **chart}

    def words(self) -> str:
        """Description of the chart in words."""
        courses = [self._course_in_words(line) for line in self.lines if not line.reference]
        return f"{self.title}. " + " ".join(courses)

    def _course_in_words(self, line: Line) -> str:
        real = [(y, x) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
        if not real:
            return f"{line.name}: nothing was measured."
        (first, _), (last, _) = real[0], real[-1]
        (low, where_low), (high, where_high) = min(real), max(real)
        return (
            f"{line.name}: from {self._number(first)} to {self._number(last)}, lowest "
            f"{self._number(low)} at {brief(where_low)}, highest {self._number(high)} at "
            f"{brief(where_high)}."
        )

    def _number(self, value: float | None) -> str:
        return size(value) if self.bytes and value is not None else brief(value, self.percent)

    def table(self) -> PageTable:
        """Table of a few points of every curve."""
        names = [self.x, *(line.name for line in self.lines)]
        places = sorted({x for line in self.lines for x in line.x})
        step = max(len(places) - 1, 1) / (_TABLE_ROWS - 1)
        chosen = sorted({round(i * step) for i in range(_TABLE_ROWS)} & set(range(len(places))))
        values = [dict(zip(line.x, line.y, strict=True)) for line in self.lines]
        rows = [
            [brief(places[i]), *(self._number(curve.get(places[i])) for curve in values)]
            for i in chosen
        ]
        return PageTable(names, rows)


@dataclass(frozen=True)
class Bars:
    """Bar chart: one value per label, perhaps with an error to each side."""

    title: str
    x: str
    y: str
    labels: Sequence[str]
    values: Sequence[float]
    about: str = ""
    percent: bool = False
    errors: Sequence[float] = ()

    def spec(self) -> dict[str, Any]:
        """The chart as JSON data for the page's script, which draws no errors."""
        return {"kind": "bars", **vars(self)}

    def words(self) -> str:
        """Description of the chart in words."""
        if not self.values:
            return f"{self.title}. Nothing."
        most = max(range(len(self.values)), key=lambda i: self.values[i])
        return (
            f"{self.title}. {len(self.values)} bars; the highest is {self.labels[most]} with "
            f"{brief(self.values[most], self.percent)}."
        )

    def table(self) -> PageTable:
        """Table of the first 200 bars."""
        rows = [
            [label, brief(value, self.percent)]
            for label, value in zip(self.labels, self.values, strict=True)
        ]
        return PageTable([self.x, self.y], rows[:200])


@dataclass(frozen=True)
class Heat:
    """Heat map of shares, ``values[row][column]`` from 0 to 1, with a label for each row.

    With ``ticks``, columns have labels too, as many as fit.
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
        """The chart as JSON data for the page's script."""
        shares = [[round(100 * share) for share in row] for row in self.values]
        return {"kind": "heat", **vars(self), "values": shares}

    def words(self) -> str:
        """Description of the chart in words."""
        return f"{self.title}. {len(self.labels)} rows of {len(self.columns)} shares."

    def table(self) -> PageTable:
        """Table of each row's mean and largest share."""
        rows = [
            [
                label,
                brief(sum(row) / max(len(row), 1), percent=True),
                brief(max(row, default=0), percent=True),
            ]
            for label, row in zip(self.labels, self.values, strict=True)
        ]
        return PageTable([self.y, "mean share", "largest share"], rows)


Chart = Lines | Bars | Heat


@dataclass(frozen=True)
class Timeline:
    """Which device trains which version when, from `fedsim.federation.buffered.timeline`.

    Each device is a row, ``{"client": id, "bars": [...]}``, as there.
    Releases are vertical lines, ``[seconds, number]``.
    """

    title: str
    devices: int
    until: float
    releases: Sequence[tuple[float, int]]
    rows: Sequence[Mapping[str, Any]]

    @property
    def about(self) -> str:
        """What the picture shows."""
        return (
            f"{len(self.rows)} of {self.devices:,} devices, the fastest on top. A bar is a device "
            "that trains the version with its number; the paler, the later its update. A thin line "
            "leads to the release that has it (the vertical lines). Dashed: dropped out. Grey: in "
            "no release."
        )

    def spec(self) -> dict[str, Any]:
        """The chart as JSON data for the page's script."""
        rows = [
            {**row, "bars": [[_short(value) for value in bar] for bar in row["bars"]]}
            for row in self.rows
        ]
        releases = [[_short(time), number] for time, number in self.releases]
        return {"kind": "timeline", "until": _short(self.until), "releases": releases, "rows": rows}

    def words(self) -> str:
        """Description of the chart in words."""
        bars = [bar for row in self.rows for bar in row["bars"]]
        late = [release - 1 - version for _, _, version, release, _, _ in bars if release]
        return (
            f"{self.title}. {len(self.rows)} of {self.devices:,} devices, {len(bars)} tasks, of "
            f"which {sum(failed for *_, failed in bars)} dropped out; the latest update was "
            f"{max(late, default=0)} versions late. Arrow keys go from task to task and device to "
            "device."
        )

    def table(self) -> PageTable:
        """Table of what each device does."""
        rows = []
        for row in self.rows:
            bars = row["bars"]
            late = [release - 1 - version for _, _, version, release, _, _ in bars if release]
            rows.append(
                [
                    f"{row['client']}",
                    brief(bars[0][1] - bars[0][0]),
                    f"{len(bars)}",
                    brief(sum(late) / len(late)) if late else brief(None),
                    f"{sum(failed for *_, failed in bars)}",
                ]
            )
        headings = ["client", "seconds a task", "tasks", "versions late, mean", "dropped out"]
        return PageTable(headings, rows)


def thinned(values: Sequence[float], at_most: int) -> list[int]:
    """Positions to draw: the first, the last, and the lowest and highest of each stretch."""
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
    """The number with five significant digits, enough for a screen; None if it is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.5g}")


_ABOUT = {
    "update-norm": "The norm of each round's released mean, including any noise.",
    "unclipped": "The share of clients whose update was within the bound, and the noise on it.",
}


def metric_chart(name: str, lines: Sequence[Line], title: str = "", **settings: Any) -> Lines:
    """Chart of a metric over rounds; ``settings`` are further fields of `Lines`."""
    percent = is_share(name, (y for line in lines for y in line.y))
    chart = Lines(title or display_name(name, title=True), "round", display_name(name), lines)
    return replace(chart, **{"percent": percent, **settings})


def learning_curves(record: RunRecord) -> list[Lines]:
    """One chart per metric: on test examples, at clients, and in training."""
    charts = []
    for name, columns in learning_columns(record.columns()).items():
        lines = [Line(EXAMPLES[whose], *record.curve(column)) for whose, column in columns.items()]
        only = f" ({lines[0].name})" if len(lines) == 1 else ""
        title = display_name(name, title=True) + only
        charts.append(metric_chart(name, lines, title, about=_about(record, columns)))
    return charts


def client_spreads(record: RunRecord) -> list[Lines]:
    """One chart per metric of its distribution over the clients that evaluated."""
    charts = []
    for name, columns in learning_columns(record.columns()).items():
        ends = [f"{columns.get('clients')}-{end}" for end in QUANTILES]
        low, p10, median, p90, high = (record.curve(column) for column in ends)
        if not len(low[0]) == len(p10[0]) == len(median[0]) == len(p90[0]) == len(high[0]) > 0:
            continue
        lines = [
            Line("median client", *median, low=p10[1], high=p90[1]),
            Line("lowest client", *low),
            Line("highest client", *high),
        ]
        about = "The band holds the middle 80 % of the clients that evaluated."
        title = f"{display_name(name, title=True)} over clients"
        charts.append(metric_chart(name, lines, title, about=about))
    return charts


def distribution_charts(distribution: Mapping[str, Any]) -> list[Chart]:
    """Charts of a partition, from `fedsim.runs.summary.distribution`."""
    charts: list[Chart] = [
        Bars(f"{what.capitalize()} a client", what, "clients", bins["labels"], bins["counts"])
        for what, bins in (
            ("examples", distribution["sizes"]),
            ("classes", distribution.get("classes")),
        )
        if bins
    ]
    if mixes := distribution.get("mixes"):
        charts.append(
            Heat(
                "Each client's mix of classes",
                x="clients, in order of their largest class",
                y="class",
                labels=mixes["labels"],
                columns=mixes["columns"],
                values=mixes["shares"],
            )
        )
    return charts


def release_curves(record: RunRecord) -> list[Lines]:
    """Charts of the numbers that each release reports, such as its bound, if they ever change."""
    charts: dict[str, list[Line]] = {}
    for column in record.columns():
        if column == "update-norm":
            charts[column] = _norms(record)
            continue
        # The value for the next round appears again in the next row.
        if subject(column) != "release" or column.startswith("next-"):
            continue
        x, y = record.curve(column)
        if len({value for value in y if math.isfinite(value)}) > 1:
            charts.setdefault(re.split(r"[./]", column)[-1], []).append(Line(column, x, y))
    return [
        metric_chart(name, lines[:8], about=_ABOUT.get(name, ""), percent=False)
        for name, lines in charts.items()
    ]


def _norms(record: RunRecord) -> list[Line]:
    """Curves of the released mean's norm, the bound on one update, and the norm of noise alone."""
    lines = [Line("the round's released mean", *record.curve("update-norm"))]
    x, bounds = record.curve("clip-norm")
    if not x:
        return lines
    lines.append(Line("the bound on one update", x, bounds, reference=True))
    share = _noise_share(record)
    if share:
        noise = [share * bound for bound in bounds]
        lines.append(Line("noise alone, about", x, noise, reference=True))
    return lines


def _noise_share(record: RunRecord) -> float | None:
    """Norm of the noise on the mean, in units of the bound: ``z sqrt(d) / denominator``."""
    multiplier = _positive(record.config.get("noise.multiplier"))
    public = record.released.public if record.released is not None else {}
    denominator = _positive(public.get(SIMULATED_COHORT) or public.get("denominator"))
    d = _positive(record.summary.get("parameters"))
    return multiplier * math.sqrt(d) / denominator if denominator else None


def _positive(value: object) -> float:
    """The value if it is a positive number, otherwise 0."""
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0


def _about(record: RunRecord, columns: Iterable[str]) -> str:
    if record.private and {"clients", "train"} & set(columns):
        if record.config.get("evaluate.private"):
            return "Metrics of clients' examples are released with noise (evaluate.private)."
        return "Metrics of clients' examples are released without noise (evaluate.unprotected)."
    return ""

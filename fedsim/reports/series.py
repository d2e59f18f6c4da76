"""Which columns of metrics.csv belong into one chart."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from fedsim.reports.charts import Line, Lines
from fedsim.reports.record import RunRecord

__all__ = [
    "OPERATORS",
    "QUANTILES",
    "client_spreads",
    "is_share",
    "learning_columns",
    "learning_curves",
    "release_curves",
    "spoken",
    "told_columns",
]

PREFIXES = {
    "test": "test examples",
    "validation": "validation examples",
    "clients": "clients' examples",
    "train": "while training",
}
"""Beginnings of a metric's columns, and whose examples it is then about."""

OPERATORS = {
    *("asked", "usable", "failed", "ignored-nodes", "clients-per-second", "seconds"),
    *("bytes-down", "bytes-up", "virtual-seconds"),
}
"""Columns that only the operator knows, and those that begin with ``failed-``."""

QUANTILES = ("min", "p10", "median", "p90", "max")
"""Ends of the columns that say how a metric spreads over clients."""

_ABOUT = {
    "update-norm": "The length of what a round released, noise and all; not what it is made of.",
    "unclipped": "The share of clients whose update was within the bound, and the noise on it.",
}

_OTHERS = {"round", "epsilon", "example-epsilon", "simulated"}
_COUNTS = {"clients-num-examples", "train-num-examples", "train-fresh-state"}


def learning_columns(columns: Iterable[str]) -> dict[str, dict[str, str]]:
    """Columns by metric and by whose examples it is about, in their order.

    Examples
    --------
    >>> learning_columns(["round", "test-loss", "train-loss", "clients-per-second"])
    {'loss': {'test': 'test-loss', 'train': 'train-loss'}}
    """
    metrics: dict[str, dict[str, str]] = {}
    columns = list(columns)
    spreads = {f"{column}-{end}" for column in columns for end in QUANTILES}
    for column in columns:
        prefix, _, name = column.partition("-")
        known = column in OPERATORS | _COUNTS or (prefix == "clients" and column in spreads)
        if prefix in PREFIXES and name and not known:
            metrics.setdefault(name, {})[prefix] = column
    return metrics


_ABBREVIATION = re.compile(r"\b(auc|f1|mae|mse|r2|rmse)\b")


def spoken(column: str, *, title: bool = False) -> str:
    """A column's or metric's name as it is said; a ``title`` begins with a capital.

    Examples
    --------
    >>> spoken("test-auc"), spoken("average-precision", title=True), spoken("rmse", title=True)
    ('test AUC', 'Average precision', 'RMSE')
    """
    text = _ABBREVIATION.sub(lambda match: match[0].upper(), column.replace("-", " "))
    return text[:1].upper() + text[1:] if title else text


def told_columns(columns: Iterable[str]) -> dict[str, str]:
    """The column to tell of each metric, and its name: on test examples, else at clients.

    Examples
    --------
    >>> told_columns(["test-loss", "clients-loss", "train-loss", "clients-accuracy"])
    {'test-loss': 'loss', 'clients-accuracy': "clients' accuracy"}
    """
    told = {}
    for name, whose in learning_columns(columns).items():
        words = spoken(name)
        if "test" in whose:
            told[whose["test"]] = words
        elif "clients" in whose:
            told[whose["clients"]] = f"clients' {words}"
    return told


def learning_curves(record: RunRecord) -> list[Lines]:
    """A chart a metric: on test examples, at clients, and while training."""
    charts = []
    for name, columns in learning_columns(record.columns()).items():
        lines = [Line(PREFIXES[who], *record.curve(column)) for who, column in columns.items()]
        only = f" ({lines[0].name})" if len(lines) == 1 else ""
        charts.append(
            Lines(
                title=spoken(name, title=True) + only,
                x="round",
                y=spoken(name),
                lines=lines,
                percent=is_share(name, (y for line in lines for y in line.y)),
                about=_about(record, columns),
            )
        )
    return charts


def client_spreads(record: RunRecord) -> list[Lines]:
    """A chart a metric of how it spreads over the clients that evaluated."""
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
        charts.append(
            Lines(
                title=f"{spoken(name, title=True)} over clients",
                x="round",
                y=spoken(name),
                lines=lines,
                about="The band holds the middle 80 % of the clients that evaluated.",
                percent=is_share(name, (y for line in lines for y in line.y)),
            )
        )
    return charts


def release_curves(record: RunRecord) -> list[Lines]:
    """A chart for each sort of number that releases say of themselves, where it ever changes."""
    charts: dict[str, list[Line]] = {}
    for column in record.columns():
        if column == "update-norm":
            charts[column] = _norms(record)
            continue
        known = column in OPERATORS | _OTHERS | _COUNTS or column.startswith("failed-")
        # What the next round will have stands in the next row.
        if known or column.partition("-")[0] in {*PREFIXES, "next"}:
            continue
        x, y = record.curve(column)
        if len({value for value in y if math.isfinite(value)}) > 1:
            charts.setdefault(re.split(r"[./]", column)[-1], []).append(Line(column, x, y))
    return [
        Lines(
            title=spoken(name, title=True),
            x="round",
            y=spoken(name),
            lines=lines[:8],
            about=_ABOUT.get(name, ""),
        )
        for name, lines in charts.items()
    ]


def _norms(record: RunRecord) -> list[Line]:
    """Norms of what was released, beside the most that an update adds and what noise adds alone."""
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
    """Norm of the noise on a mean, in units of the bound: ``z sqrt(d) / denominator``."""
    config = record.config
    keys = ("noise.multiplier", "partition.clients", "cohort.rate", "cohort.size")
    multiplier, clients, rate, size = (_positive(config.get(key)) for key in keys)
    expected = {"full": clients, "fixed": size, "poisson": clients * rate}
    larger = _positive(config.get("noise.cohort-size"))
    denominator = larger or expected.get(str(config.get("cohort.name")), 0.0)
    d = _positive(record.summary.get("parameters"))
    return multiplier * math.sqrt(d) / denominator if denominator else None


def _positive(value: object) -> float:
    """A number, or 0 for what is none."""
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0


def is_share(name: str, values: Iterable[float]) -> bool:
    """Whether a metric reads better as a share of a hundred."""
    real = [value for value in values if math.isfinite(value)]
    shares = bool(re.search(r"accuracy|precision|recall|share|fraction|rate$|top-k", name))
    return shares and all(0 <= value <= 1 for value in real)


def _about(record: RunRecord, columns: Iterable[str]) -> str:
    if record.private and {"clients", "train"} & set(columns):
        return "What is of clients' examples is released without noise (evaluate.unprotected)."
    return ""


def lowest_is_best(name: str) -> bool:
    """Whether less of a metric is better, as far as its name tells."""
    return bool(re.search(r"loss|error|perplexity|mse|mae|rmse", name))


def tail_mean(values: Sequence[float], count: int = 5) -> float | None:
    """Mean of the last few numbers; None if there are fewer."""
    real = [value for value in values if math.isfinite(value)][-count:]
    return math.fsum(real) / count if len(real) == count else None

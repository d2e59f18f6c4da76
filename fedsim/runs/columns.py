"""Columns of metrics.csv and numbers as text, for terminals, notebooks and pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence


def brief(value: float | None, percent: bool = False) -> str:
    """Four digits, or a share of a hundred; a dash where there is no number.

    Examples
    --------
    >>> brief(0.92504, percent=True), brief(1234567), brief(0.00001234), brief(None)
    ('92.50 %', '1,234,567', '1.234e-05', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    if percent:
        return f"{100 * value:.2f} %"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """In the two largest units.

    Examples
    --------
    >>> duration(0.04), duration(61), duration(7325)
    ('0.04 s', '1 min 1 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def size(count: float) -> str:
    """Bytes in the unit that leaves three digits.

    Examples
    --------
    >>> size(2960), size(3.2e9), size(math.nan)
    ('2.96 kB', '3.2 GB', '–')
    """
    if not math.isfinite(count):
        return brief(count)
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {units[power]}"


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


EXAMPLE_COUNTS = {"clients-num-examples", "train-num-examples", "train-fresh-state"}


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
        known = column in OPERATORS | EXAMPLE_COUNTS or (prefix == "clients" and column in spreads)
        if prefix in PREFIXES and name and not known:
            metrics.setdefault(name, {})[prefix] = column
    return metrics


_ABBREVIATION = re.compile(r"\b(auc|f1|mae|mse|r2|rmse)\b")


def display_name(column: str, *, title: bool = False) -> str:
    """A column's or metric's name as it is said; a ``title`` begins with a capital.

    Examples
    --------
    >>> display_name("test-auc"), display_name("average-precision", title=True)
    ('test AUC', 'Average precision')
    """
    text = _ABBREVIATION.sub(lambda match: match[0].upper(), column.replace("-", " "))
    return text[:1].upper() + text[1:] if title else text


def headline_columns(columns: Iterable[str]) -> dict[str, str]:
    """The column to tell of each metric, and its name: on test examples, else at clients.

    Examples
    --------
    >>> headline_columns(["test-loss", "clients-loss", "train-loss", "clients-accuracy"])
    {'test-loss': 'loss', 'clients-accuracy': "clients' accuracy"}
    """
    headlines = {}
    for name, whose in learning_columns(columns).items():
        words = display_name(name)
        if "test" in whose:
            headlines[whose["test"]] = words
        elif "clients" in whose:
            headlines[whose["clients"]] = f"clients' {words}"
    return headlines


def is_share(name: str, values: Iterable[float]) -> bool:
    """Whether a metric reads better as a share of a hundred."""
    real = [value for value in values if math.isfinite(value)]
    shares = bool(re.search(r"accuracy|precision|recall|share|fraction|rate$|top-k", name))
    return shares and all(0 <= value <= 1 for value in real)


def lowest_is_best(name: str) -> bool:
    """Whether less of a metric is better, as far as its name tells."""
    return bool(re.search(r"loss|error|perplexity|mse|mae|rmse", name))


def tail_mean(values: Sequence[float], count: int = 5) -> float | None:
    """Mean of the last few numbers; None if there are fewer."""
    real = [value for value in values if math.isfinite(value)][-count:]
    return math.fsum(real) / count if len(real) == count else None

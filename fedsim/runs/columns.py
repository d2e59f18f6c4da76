"""The columns of metrics.csv: what each is about, which are a metric's, and their names as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from fedsim.privacy.statement import epsilon_marks

Row = Mapping[str, float | int]

EXAMPLES: Mapping[str, str] = {
    "test": "test examples",
    "validation": "validation examples",
    "clients": "clients' examples",
    "train": "while training",
}
"""Beginnings of a metric's columns, and whose examples it is then about."""

QUANTILES = ("min", "p10", "median", "p90", "max")
"""Ends of the columns that say how a metric spreads over clients."""

_NAMES: Mapping[str, set[str]] = {
    "round": {"round"},
    "privacy": {"epsilon", "epsilon-so-far", "example-epsilon", "simulated", "declared"},
    "operator": {
        *("asked", "usable", "failed", "summed", "ignored-nodes"),
        *("clients-num-examples", "train-num-examples", "train-fresh-state"),
        *("bytes-down", "bytes-up", "virtual-seconds", "clients-per-second", "seconds"),
    },
}


def subject(column: str) -> str:
    """What a column is about: "round"; "privacy", what is spent of it; "operator", what only the
    operator knows; one of `EXAMPLES`; or "release", what a release says of itself.

    Examples
    --------
    >>> subject("test-loss"), subject("failed-timeout"), subject("clip-norm")
    ('test', 'operator', 'release')
    """
    for about, names in _NAMES.items():
        if column in names:
            return about
    beginning, _, name = column.partition("-")
    if beginning == "failed" and name:
        return "operator"
    return beginning if beginning in EXAMPLES and name else "release"


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
        examples = subject(column)
        if examples in EXAMPLES and not (examples == "clients" and column in spreads):
            metrics.setdefault(column.partition("-")[2], {})[examples] = column
    return metrics


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


_ABBREVIATION = re.compile(r"\b(auc|f1|mae|mse|r2|rmse)\b")


def display_name(column: str, *, title: bool = False) -> str:
    """A column's or metric's name in words; a ``title`` begins with a capital.

    Examples
    --------
    >>> display_name("test-auc"), display_name("average-precision", title=True)
    ('test AUC', 'Average precision')
    """
    text = _ABBREVIATION.sub(lambda match: match[0].upper(), column.replace("-", " "))
    return text[:1].upper() + text[1:] if title else text


def is_share(name: str, values: Iterable[float]) -> bool:
    """Whether a metric reads better as a share of a hundred."""
    real = [value for value in values if math.isfinite(value)]
    shares = bool(re.search(r"accuracy|precision|recall|share|fraction|rate$|top-k", name))
    return shares and all(0 <= value <= 1 for value in real)


def lowest_is_best(name: str) -> bool:
    """Whether less of a metric is better, as far as its name tells."""
    return bool(re.search(r"loss|error|perplexity|mse|mae|rmse", name))


def row_marks(row: Row) -> str:
    """What must stand beside an epsilon of a row, wherever it is shown: see `epsilon_marks`."""
    return epsilon_marks(bool(row.get("simulated")), bool(row.get("declared")))

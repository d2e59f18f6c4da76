"""metrics.csv, one row for each round: its columns, its file, and numbers as text."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy.durable import named_errors, replace
from fedsim.privacy.statement import epsilon_marks

Row = Mapping[str, float | int]

EXAMPLES: Mapping[str, str] = {
    "test": "test examples",
    "validation": "validation examples",
    "clients": "clients' examples",
    "train": "while training",
}
"""Prefixes of metrics' columns, and the examples that they are about."""

QUANTILES = ("min", "p10", "median", "p90", "max")
"""Suffixes of the columns for a metric's distribution over clients."""

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
    """What a column is about: "round"; "privacy" (spent); "operator" (known to the operator only);
    one of `EXAMPLES`; or "release" (information about a release).

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
    """Columns by metric and by examples (a key of `EXAMPLES`), in their order.

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
    """Main column of each metric, and its display name: on test examples, else on clients'.

    Examples
    --------
    >>> headline_columns(["test-loss", "clients-loss", "train-loss", "clients-accuracy"])
    {'test-loss': 'loss', 'clients-accuracy': "clients' accuracy"}
    """
    headlines = {}
    for name, column_of in learning_columns(columns).items():
        words = display_name(name)
        if "test" in column_of:
            headlines[column_of["test"]] = words
        elif "clients" in column_of:
            headlines[column_of["clients"]] = f"clients' {words}"
    return headlines


_ABBREVIATION = re.compile(r"\b(auc|f1|mae|mse|r2|rmse)\b")


def display_name(column: str, *, title: bool = False) -> str:
    """A column's or metric's name in words; with ``title`` it starts with a capital.

    Examples
    --------
    >>> display_name("test-auc"), display_name("average-precision", title=True)
    ('test AUC', 'Average precision')
    """
    text = _ABBREVIATION.sub(lambda match: match[0].upper(), column.replace("-", " "))
    return text[:1].upper() + text[1:] if title else text


def is_share(name: str, values: Iterable[float]) -> bool:
    """Whether to show a metric in percent, by its name and values."""
    real = [value for value in values if math.isfinite(value)]
    shares = bool(re.search(r"accuracy|precision|recall|share|fraction|rate$|top-k", name))
    return shares and all(0 <= value <= 1 for value in real)


def is_lower_better(name: str) -> bool:
    """Whether a lower value of a metric is better, guessed from its name."""
    return bool(re.search(r"loss|error|perplexity|mse|mae|rmse", name))


def row_marks(row: Row) -> str:
    """Marks that must be shown next to a row's epsilon: see `epsilon_marks`."""
    return epsilon_marks(row.get("simulated") or 0, row.get("declared") or 0)


class MetricsFile:
    """The metrics.csv of a run's directory.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: tuple[str, ...] = ()

    def start(self, columns: Sequence[str], rows: Iterable[Row] = ()) -> None:
        """Write the header, which is fixed until the run is resumed, and these rows.

        Columns of the rows that the run does not have any more stay, as its checkpoints count them.
        """
        rows = [*rows]
        self._columns = tuple(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
        lines = [_csv_line([row.get(column, "") for column in self._columns]) for row in rows]
        replace(self.path, b"".join([_csv_line(self._columns), *lines]))

    def append(self, row: Row) -> None:
        """Append a round's row; columns without a value stay empty."""
        unknown = [key for key in row if key not in self._columns]
        if unknown:
            raise ValueError(f"metrics.csv has no column {unknown[0]!r}.")
        line = _csv_line([row.get(column, "") for column in self._columns])
        with named_errors(self.path), open(self.path, "ab", opener=_opener_of_existing) as file:
            file.write(line)

    def sync(self) -> None:
        """Sync the rows to disk, before a checkpoint that relies on them."""
        with named_errors(self.path), open(self.path, "rb", opener=regular_files.opener) as file:
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """The complete rows, each without its empty columns; empty if there is no file.

        Raises
        ------
        FedsimError
            If a value is not a number, or a row has no round.
        """
        try:
            rows: list[Row] = [
                {key: _number(text) for key, text in row.items()} for row in self._texts()
            ]
        except (ValueError, TypeError, csv.Error) as error:
            raise self._damaged(str(error)) from None
        if any("round" not in row for row in rows):
            raise self._damaged("a row has no round")
        return rows

    def rows_before(self, length: int, code: str) -> list[Row]:
        """The first ``length - 1`` rows; empty if the file was removed.

        Parameters
        ----------
        length : int
            A checkpoint's number of rows, the last of which is in the checkpoint itself.
        code : str
            The checkpoint's digest of these rows, made by `update_digest`.

        Raises
        ------
        FedsimError
            If they are not the rows that the run wrote before the checkpoint.
        """
        rows = self.rows()[: max(length - 1, 0)]
        if self.path.exists():
            found = hashlib.sha256()
            for row in self._texts()[: len(rows)]:
                update_digest(found, row)
            if found.hexdigest() != code:
                raise self._damaged(f"its first {len(rows)} rows are not those that the run wrote")
        return rows

    def _texts(self) -> list[dict[str, str]]:
        try:
            text = regular_files.read_bytes(self.path).decode()
        except FileNotFoundError:
            return []
        # The last line may be half-written.
        complete = io.StringIO(text[: text.rfind("\n") + 1], newline="")
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(complete)]

    def _damaged(self, cause: str) -> FedsimError:
        return FedsimError(
            f"{self.path} is damaged ({cause}); restore the one that the run wrote, or remove it, "
            "and with it the rows of the rounds so far."
        )


class Hash(Protocol):
    """A digest of hashlib."""

    def update(self, data: bytes, /) -> object:
        """Add bytes."""


def update_digest(code: Hash, row: Mapping[str, object]) -> None:
    """Add a row, as written in metrics.csv, to a digest; the order of columns does not matter."""
    # `csv` writes numbers by `str` too, so that a row read back as text gives the same code.
    code.update("".join(f"{key}={row[key]}\n" for key in sorted(row)).encode() + b"\n")


def _opener_of_existing(path: str, flags: int) -> int:
    """Opener that creates nothing: a file that was removed must not return without its header."""
    return regular_files.opener(path, flags & ~os.O_CREAT)


def _number(text: str) -> float | int:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _csv_line(values: Sequence[object]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerow(values)
    return text.getvalue().encode()


def finite_json(value: Any) -> Any:
    """The value with every non-finite number, at any depth, replaced by None (null in JSON)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite_json(content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(content) for content in value]
    return value


def brief(value: float | None, percent: bool = False) -> str:
    """A number with four digits, or in percent; a dash for None and NaN.

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


def format_metric(name: str, value: float) -> str:
    """A metric as `brief` writes it, in percent if `is_share`."""
    return brief(value, is_share(name, [value]))


def duration(seconds: float) -> str:
    """A duration in its two largest units.

    Examples
    --------
    >>> duration(0.04), duration(61), duration(7325)
    ('0.04 s', '1 min 1 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_seconds} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def size(count: float) -> str:
    """A number of bytes in the unit that leaves three digits.

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


LAST_EVALUATIONS = 5
"""Number of last evaluations whose mean is reported."""


def recent_mean(rows: Sequence[Row], column: str, *, least: int = 1) -> float | None:
    """Mean of a column over the last five evaluations; None if there are fewer than ``least``.

    Round 0, the untrained model, counts only if no other round has a value.

    Examples
    --------
    >>> recent_mean([{"round": k, "test-loss": 3.0 - k} for k in range(3)], "test-loss")
    1.5
    """
    measured = [row for row in rows if column in row]
    trained = [row for row in measured if row["round"] > 0] or measured
    values = [row[column] for row in trained[-LAST_EVALUATIONS:]]
    return float(np.mean(values)) if len(values) >= least else None

"""report.html: a run's settings, results and privacy cost on one page.

This module computes each section's content as plain data; ``templates/run.html`` is the markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tomli_w

from fedsim.config import RunConfig, Scalar
from fedsim.config.run_config import nested
from fedsim.privacy import Statement
from fedsim.reports.charts import (
    MAX_POINTS,
    Bars,
    Cell,
    Heat,
    Line,
    Lines,
    PageTable,
    Timeline,
    client_spreads,
    distribution_charts,
    learning_curves,
    release_curves,
)
from fedsim.reports.describe import description, ending_sentence
from fedsim.reports.page import render
from fedsim.runs.metrics import (
    LAST_EVALUATIONS,
    brief,
    display_name,
    duration,
    is_lower_better,
    is_share,
    learning_columns,
    recent_mean,
    size,
)
from fedsim.runs.record import RunRecord

OPERATORS_FACTS = (
    "For the operator only: these numbers influenced no release, and are not covered by the "
    "guarantee. Do not publish them with the model."
)

_SHOWN_CLASSES = 20
_SHOWN_REASONS = 6


def run_page(record: RunRecord) -> str:
    """The page of one run, as one self-contained HTML file.

    For a private run it shows public values, and marks those that only the operator may see.
    Values computed from clients' data without noise are in the record, and so on the page, only if
    ``evaluate.unprotected`` is set.
    """
    config, summary = record.config, record.summary
    learning = learning_curves(record)
    return render(
        "run.html",
        title=record.name,
        subtitle=_subtitle(record),
        description=description(config, record.released, record.objects),
        ending=ending_sentence(summary, record.rounds, config.get("rounds", "?")),
        notes=summary.get("notes", ()),
        tiles=_tiles(record),
        private=record.private,
        operators_facts=OPERATORS_FACTS,
        learning=learning,
        not_finite=_not_finite(record),
        thinned=any(len(line.x) > MAX_POINTS for chart in learning for line in chart.lines),
        ledgered=any(statement.cost.releases for statement in record.statements),
        asks_for_privacy=record.asks_for_privacy,
        simulated=any(s.simulated and s.private for s in record.statements),
        statements=[statement.sentences() for statement in record.statements],
        spending=[*_spending(record), *(_tradeoff(s) for s in record.statements if s.protects)],
        mistakes=_test_errors(record),
        noun=record.client_noun or "owner",
        owners=_by_owner(record),
        bound=_bound(record),
        releases=release_curves(record),
        clients=_clients(record),
        partition=_partition(record),
        machine=_machine(record),
        times=[*_timeline(record), *_over_virtual_time(record), *_times(record)],
        changed=_changed(config),
        config=tomli_w.dumps(nested(config)),
    )


def _subtitle(record: RunRecord) -> str:
    version = record.summary.get("versions", {}).get("fedsim")
    parts = [str(record.config.get("name", "")), str(record.summary.get("ended-at", ""))]
    parts += [f"fedsim {version}"] if version else []
    return " · ".join(part for part in parts if part)


def _tiles(record: RunRecord) -> list[tuple[str, str]]:
    """The headline numbers at the top of the page, as (value, label)."""
    tiles: list[tuple[str, str]] = []
    for name, columns in sorted(
        learning_columns(record.columns()).items(), key=lambda item: is_lower_better(item[0])
    ):
        column = columns.get("test") or next(iter(columns.values()))
        values = record.curve(column)[1]
        percent = is_share(name, values)
        mean = recent_mean(record.rows, column, least=LAST_EVALUATIONS)
        recent = "" if mean is None else f"; last five {brief(mean, percent)}"
        tiles.append((brief(record.last(column), percent), display_name(column) + recent))
    for statement in record.statements:
        if statement.private and statement.cost.releases:
            level = f"{statement.level} level, delta {statement.delta:g}"
            tiles.append((brief(statement.epsilon), f"{statement.epsilon_label}, {level}"))
    if record.statements and not any(s.private for s in record.statements):
        tiles.append(("none", "guarantee of privacy"))
    one = record.rounds == 1
    tiles.append((f"{record.rounds:,}", "round" if one else "rounds"))
    if seconds := record.curve("seconds")[1]:
        tiles.append((duration(math.fsum(seconds)), "in this round" if one else "in these rounds"))
    return tiles


def _not_finite(record: RunRecord) -> str:
    count = sum(1 for row in record.rows for value in row.values() if not math.isfinite(value))
    return f"{count:,}" if count else ""


def _spending(record: RunRecord) -> list[Lines]:
    """Chart of epsilon over rounds, with the budgets as reference lines."""
    lines = []
    for column, name, key in (
        ("epsilon", "client level", "noise.max-epsilon"),
        ("epsilon-so-far", "had it been planned to end here", ""),
        ("example-epsilon", "example level", "client.noise.max-epsilon"),
    ):
        x, y = record.curve(column)
        if not any(math.isfinite(value) for value in y):
            continue
        lines.append(Line(name, x, y).from_origin())
        budget = record.config.get(key)
        if isinstance(budget, int | float):
            ends = [0.0, x[-1]]
            lines.append(Line(f"budget, {name}", ends, [float(budget)] * 2, reference=True))
    label = next((s.epsilon_label for s in record.statements if s.private), "epsilon")
    return [Lines("Epsilon over rounds", "round", label, lines)] if lines else []


def _tradeoff(statement: Statement) -> Lines:
    """Chart of an attack's least false-negative rate, for every false-positive rate."""
    false_positive_rates = np.concatenate([np.linspace(0, 0.1, 31), np.linspace(0.1, 1, 37)[1:]])
    missed = statement.tradeoff(false_positive_rates)
    return Lines(
        f"Trade-off curve ({statement.level} level)",
        x="false-positive rate",
        y="least false-negative rate",
        lines=[
            Line("this run", false_positive_rates.tolist(), missed.tolist()),
            Line("random guessing", [0.0, 1.0], [1.0, 0.0], reference=True),
        ],
        about=(
            "No membership-inference attack has errors below the curve. The nearer it is to the "
            "diagonal, the less an attack can learn."
        ),
        percent=True,
        square=True,
    )


def _test_errors(record: RunRecord) -> dict[str, Any] | None:
    """The model's errors on test examples: a confusion matrix, or predicted against true values."""
    test = record.summary.get("test") or {}
    mistakes: dict[str, Any] = {
        "of_clients": record.private and record.summary.get("test-of-clients"),
        "summary": "",
        "matrix": None,
        "frequent": None,
        "charts": [],
    }
    if test.get("kind") == "numbers":
        return mistakes | {"charts": [_scatter(test)]}
    if test.get("kind") != "classes":
        return None
    counts = np.asarray(test["counts"], dtype=np.int64)
    several = bool(record.summary.get("data", {}).get("y-shape"))
    answers = "answers on test examples" if several else "test examples"
    mistakes["summary"] = (
        f"{counts.sum():,} {answers}: a row for each true class, a column for each predicted one."
    )
    return mistakes | _confusion(counts, test.get("labels") or list(map(str, range(len(counts)))))


def _by_owner(record: RunRecord) -> PageTable | None:
    """Metrics on the test examples of each owner."""
    owners = record.summary.get("owners")
    if not owners:
        return None
    names = list(next(iter(owners.values())))
    rows = [
        [owner, *(_cell(name, math.nan if value is None else value) for name, value in m.items())]
        for owner, m in owners.items()
    ]
    return PageTable([record.client_noun or "owner", *map(display_name, names)], rows, "owners")


def _cell(name: str, value: float) -> Cell:
    return Cell(brief(value, is_share(name, [value])), value)


def _confusion(counts: npt.NDArray[np.int64], names: list[str]) -> dict[str, Any]:
    """The matrix for few classes; for many, the most frequent mistakes and the worst classes."""
    truths = np.maximum(counts.sum(1), 1)
    has_examples = counts.any(1)
    recall = np.where(has_examples, np.diag(counts) / truths, np.nan)
    if len(counts) <= _SHOWN_CLASSES:
        rows = [
            (
                name,
                [
                    (f"{count:,}" if count else "·", f"{count / total:.3f}")
                    for count in counts[i].tolist()
                ],
                brief(float(recall[i]), True),
            )
            for i, (name, total) in enumerate(zip(names, truths, strict=True))
        ]
        return {"matrix": {"names": names, "rows": rows}}
    wrong = counts - np.diag(np.diag(counts))
    places = sorted(zip(*np.nonzero(wrong), strict=True), key=lambda ij: (wrong[ij], ij))
    most = places[: -_SHOWN_CLASSES - 1 : -1]
    # NaN, of classes without test examples, is sorted to the end.
    worst = np.argsort(recall, kind="stable")[: min(60, has_examples.sum())].tolist()
    return {
        "frequent": PageTable(
            ["class", "taken for", "examples", "of the class"],
            [
                [names[i], names[j], f"{wrong[i, j]:,}", brief(wrong[i, j] / truths[i], True)]
                for i, j in most
            ],
        ),
        "charts": [
            Bars(
                "Classes that are recognised least",
                "class",
                "recognised",
                [names[k] for k in worst],
                [float(recall[k]) for k in worst],
                percent=True,
            )
        ],
    }


def _scatter(test: Mapping[str, Any]) -> Heat:
    """Binned chart of predicted against true values."""
    return Heat(
        "Predicted against true values",
        x="true value",
        y="predicted",
        labels=test["predicted"],
        columns=test["true"],
        values=test["shares"],
        about="Each column's test examples by their predictions.",
        ticks=True,
    )


def _bound(record: RunRecord) -> str:
    bound = record.last("clip-norm")
    if bound is None and not release_curves(record):
        return ""
    sentence = (
        "" if bound is None else f"The bound on an update's norm was {brief(bound)} at the end."
    )
    if record.client_private:
        sentence += (
            " Norms of single updates are not public, and nothing here is computed from them."
        )
    return sentence.strip()


def _clients(record: RunRecord) -> dict[str, Any] | None:
    """Numbers of clients that were sampled, usable and failed, with reasons of failure."""
    if record.last("asked") is None:
        return None
    reasons = [column for column in record.columns() if column.startswith("failed-")]
    totals = {
        column: sum(row.get(column, 0) for row in record.rows if math.isfinite(row.get(column, 0)))
        for column in ("asked", "usable", "failed", *reasons)
    }
    happened = [column for column in reasons if totals[column]]
    shown = ("asked", "usable", *happened[:_SHOWN_REASONS]) if totals["failed"] else ("asked",)
    lines = [Line(name.replace("failed-", "failed: "), *record.curve(name)) for name in shown]
    summary = (
        f"Clients were asked {brief(totals['asked'])} times: {brief(totals['usable'])} updates "
        f"were usable, and {brief(totals['failed'])} failed."
    )
    charts = [Lines("Clients of each round", "round", "clients", lines, counts=True)]
    sizes = set(lines[0].y)
    if len(lines) == 1 and len(sizes) == 1:
        summary, charts = f"{brief(sizes.pop())} clients in every round. {summary}", []
    rows = [[column.removeprefix("failed-"), brief(totals[column])] for column in happened]
    table = PageTable(["reason", "times"], rows) if rows else None
    return {"summary": summary, "reasons": table, "charts": charts}


def _partition(record: RunRecord) -> dict[str, Any] | None:
    """Charts of examples and classes per client, and of metrics over clients."""
    split = record.summary.get("partition")
    if not split:
        return None
    return {
        "summary": split["said"],
        "charts": [*distribution_charts(split), *client_spreads(record)],
    }


def _machine(record: RunRecord) -> dict[str, str]:
    summary = record.summary
    facts: dict[str, str] = {}
    if seconds := record.curve("seconds")[1]:
        facts["all rounds"] = duration(math.fsum(seconds))
        facts["a round"] = f"{duration(float(np.median(seconds)))} (median)"
    for name, key in (("most memory", "peak-memory"), ("most GPU memory", "peak-gpu-memory")):
        if memory := summary.get(key):
            facts[name] = size(memory)
    about = {**summary.get("machine", {}), **summary.get("versions", {})}
    return facts | {name: str(value) for name, value in about.items()}


def _times(record: RunRecord) -> list[Lines]:
    return [
        Lines(
            title,
            "round",
            unit,
            [Line(name, *record.curve(column)) for column, name in lines],
            bytes=unit == "bytes",
        )
        for title, unit, lines in _TIMES
        if all(record.curve(column)[1] for column, _ in lines)
        # Between releases of a buffered run: its timeline has them.
        and not (title == _OF_DEVICES and "timeline" in record.summary)
    ]


def _timeline(record: RunRecord) -> list[Timeline]:
    """Picture of a buffered run's devices."""
    shown = record.summary.get("timeline")
    return [Timeline("Who trains which version when", **shown)] if shown else []


def _over_virtual_time(record: RunRecord) -> list[Lines]:
    """Chart of the model's quality over the clock of simulated devices, if they take time."""
    rounds, seconds = record.curve("virtual-seconds")
    column = next((name for name in ("test-accuracy", "test-loss") if record.curve(name)[1]), None)
    if not rounds or column is None:
        return []
    clock = {0.0: 0.0} | dict(zip(rounds, np.cumsum(seconds).tolist(), strict=True))
    numbers, values = record.curve(column)
    points = [(clock[n], value) for n, value in zip(numbers, values, strict=True) if n in clock]
    name = column.removeprefix("test-")
    line = Line(name, [time for time, _ in points], [value for _, value in points])
    return [
        Lines(
            f"Test {name} over the devices' time",
            "virtual seconds",
            name,
            [line],
            percent=name == "accuracy",
        )
    ]


_OF_DEVICES = "Seconds that a round of devices would take"
_TIMES = (
    ("Seconds a round", "seconds", (("seconds", "seconds"),)),
    (_OF_DEVICES, "seconds", (("virtual-seconds", "seconds"),)),
    ("Bytes that a round would move", "bytes", (("bytes-down", "to them"), ("bytes-up", "back"))),
)


def _changed(config: Mapping[str, Scalar]) -> dict[str, str]:
    """Keys whose values are not the defaults."""
    defaults = RunConfig().to_run_config()
    return {
        key: str(value)
        for key, value in config.items()
        if value != defaults.get(key) and value != ""
    }

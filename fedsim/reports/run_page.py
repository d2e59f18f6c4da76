"""report.html: what a run was, what it reached, what it cost, in one page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tomli_w

from fedsim.config import RunConfig
from fedsim.privacy import Statement
from fedsim.reports import words
from fedsim.reports.charts import Bars, Chart, Heat, Line, Lines, numbers_table
from fedsim.reports.markup import Markup, tag
from fedsim.reports.numbers import brief, duration, size
from fedsim.reports.page import Page
from fedsim.reports.record import RunRecord
from fedsim.reports.series import (
    client_spreads,
    is_share,
    learning_columns,
    learning_curves,
    lowest_is_best,
    release_curves,
    spoken,
    tail_mean,
)

__all__ = ["run_page"]

OPERATORS_FACTS = (
    "The operator's facts: seen by whoever runs this, decided nothing, and not covered by the "
    "guarantee. Do not publish them with the model."
)

_SHOWN_CLASSES = 20


def run_page(record: RunRecord) -> str:
    """The page of one run, as HTML that stands alone.

    Of a run with a guarantee it shows what is public, and the operator's facts by that name;
    what clients' data alone would tell is not in a record unless ``evaluate.unprotected`` is set.
    """
    page = Page(record.name)
    page.lead(
        _subtitle(record),
        tag("p", words.told(record.config), class_="lead"),
        words.ended(record.summary, record.rounds, record.config.get("rounds", "?")),
        *(tag("p", note, class_="quiet") for note in record.summary.get("notes", ())),
        _tiles(record),
    )
    page.section("What it learnt", *_learning(record))
    page.section("Privacy", *_privacy(record))
    page.section("What it gets wrong", *_mistakes(record))
    page.section("Updates and their bound", *_releases(record))
    page.section("Clients", *_clients(record))
    page.section("How data falls on clients", *_partition(record))
    page.section("Time and memory", *_time(record))
    page.section("Config", *_config(record))
    return page.html()


def _subtitle(record: RunRecord) -> Markup:
    made = record.summary.get("versions", {})
    parts = [str(record.config.get("name", "")), str(record.summary.get("ended-at", ""))]
    if version := made.get("fedsim"):
        parts.append(f"fedsim {version}")
    return tag("p", " · ".join(part for part in parts if part), class_="quiet")


def _tiles(record: RunRecord) -> Markup:
    """The few numbers that everybody asks for first."""
    tiles: list[tuple[str, str]] = []
    for name, columns in sorted(
        learning_columns(record.columns()).items(), key=lambda item: lowest_is_best(item[0])
    ):
        column = columns.get("test") or next(iter(columns.values()))
        values = record.curve(column)[1]
        last = record.last(column)
        percent = is_share(name, values)
        mean = tail_mean(values)
        recent = "" if mean is None else f"; last five {brief(mean, percent)}"
        tiles.append((brief(last, percent), spoken(column) + recent))
    for statement in record.statements:
        if statement.private and statement.cost.releases:
            level = f"{statement.level} level, delta {statement.delta:g}"
            tiles.append((brief(statement.epsilon), f"{statement.words}, {level}"))
    if record.statements and not any(s.private for s in record.statements):
        tiles.append(("none", "guarantee of privacy"))
    one = record.rounds == 1
    tiles.append((f"{record.rounds:,}", "round" if one else "rounds"))
    if seconds := record.curve("seconds")[1]:
        tiles.append((duration(math.fsum(seconds)), "in this round" if one else "in these rounds"))
    items = [tag("li", tag("strong", number), tag("span", what)) for number, what in tiles]
    return tag("ul", *items, class_="tiles")


def _learning(record: RunRecord) -> list[Markup | Chart | str]:
    charts = learning_curves(record)
    holes = sum(1 for row in record.rows for value in row.values() if not math.isfinite(value))
    parts: list[Markup | Chart | str] = []
    if not charts:
        parts.append("Nothing was evaluated.")
    if holes:
        parts.append(tag("p", f"{holes:,} of the numbers are not finite.", class_="warning"))
    if any(len(line.x) > 1000 for chart in charts for line in chart.lines):
        parts.append(
            "Of so many rounds the charts show the highs and lows; all are in metrics.csv."
        )
    return [*parts, *charts]


def _privacy(record: RunRecord) -> list[Markup | Chart | str]:
    parts: list[Markup | Chart | str] = []
    if not any(statement.cost.releases for statement in record.statements):
        if record.meant_private:
            missing = "There is no ledger of this run's releases: what it has cost is not known."
            return [tag("p", missing, class_="warning")]
        return ["There is no ledger of private releases: this run claims no privacy."]
    for statement in record.statements:
        if statement.simulated and statement.private:
            parts.append(
                tag(
                    "p",
                    "Simulated: noise follows from the config's seed. This tells what a real run "
                    'would cost; for real data set noise.entropy = "system".',
                    class_="warning",
                )
            )
            break
    for statement in record.statements:
        first, *others = statement.sentences()
        parts.append(tag("p", first, class_="lead"))
        parts.append(tag("ul", *(tag("li", sentence) for sentence in others), class_="fine"))
    charts: list[Chart | None] = [_spending(record)]
    charts += [_tradeoff(statement) for statement in record.statements if statement.private]
    return [*parts, *(chart for chart in charts if chart is not None)]


def _spending(record: RunRecord) -> Lines | None:
    """Epsilon over rounds, and where a budget would end it."""
    names = {"epsilon": "client level", "example-epsilon": "example level"}
    budgets = {"epsilon": "noise.max-epsilon", "example-epsilon": "client.noise.max-epsilon"}
    lines = []
    for column, name in names.items():
        x, y = record.curve(column)
        if not any(math.isfinite(value) for value in y):
            continue
        lines.append(Line(name, [0.0, *x], [0.0, *y]))
        budget = record.config.get(budgets[column])
        if isinstance(budget, int | float):
            ends = [0.0, x[-1]]
            lines.append(Line(f"budget, {name}", ends, [float(budget)] * 2, reference=True))
    if not lines:
        return None
    called = next((s.words for s in record.statements if s.private), "epsilon")
    return Lines("Epsilon as it was spent", "round", called, lines)


def _tradeoff(statement: Statement) -> Lines:
    """What an attacker must miss, for every rate of false alarms."""
    alarms = np.concatenate([np.linspace(0, 0.1, 41), np.linspace(0.1, 1, 60)[1:]])
    missed = statement.tradeoff(alarms)
    return Lines(
        f"What an attacker must miss ({statement.level} level)",
        x="false alarms",
        y="misses at least",
        lines=[
            Line("this run", alarms.tolist(), missed.tolist()),
            Line("a blind guess", [0.0, 1.0], [1.0, 0.0], reference=True),
        ],
        about=(
            "Whoever guesses which of two neighbouring federations it was cannot be below the "
            "curve. The nearer to the diagonal, the less there is to be learnt."
        ),
        percent=True,
        square=True,
    )


def _mistakes(record: RunRecord) -> list[Markup | Chart | str]:
    test = record.summary.get("test") or {}
    if test.get("kind") == "classes":
        counts = np.asarray(test["counts"], dtype=np.int64)
        several = bool(record.summary.get("data", {}).get("y-shape"))
        what = "answers on test examples" if several else "test examples"
        return [*_whose(record), *_confusion(counts, test.get("labels"), what)]
    if test.get("kind") == "numbers":
        return [*_whose(record), _scatter(test)]
    return []


def _whose(record: RunRecord) -> list[Markup | Chart | str]:
    """That test examples are clients', where a guarantee covers these."""
    if not (record.private and record.summary.get("test-of-clients")):
        return []
    said = "Test examples are clients' own, and measured without noise (evaluate.unprotected)"
    return [tag("p", f"{said}: not covered.", class_="operator")]


def _confusion(counts: Any, labels: list[str] | None, what: str) -> list[Markup | Chart | str]:
    names = labels or [str(k) for k in range(len(counts))]
    truths = counts.sum(1)
    recall = np.divide(np.diag(counts), truths, out=np.zeros(len(counts)), where=truths > 0)
    parts: list[Markup | Chart | str] = [
        f"{counts.sum():,} {what}: a row for each true class, a column for what the model said."
    ]
    if len(counts) <= _SHOWN_CLASSES:
        parts.append(_matrix(counts, names, recall))
        return parts
    wrong = [
        (int(counts[i, j]), i, j)
        for i, j in zip(*np.nonzero(counts - np.diag(np.diag(counts))), strict=True)
    ]
    most = sorted(wrong, reverse=True)[:_SHOWN_CLASSES]
    parts.append("The most frequent mistakes:")
    rows = [[names[i], names[j], f"{n:,}", brief(n / truths[i], True)] for n, i, j in most]
    parts.append(numbers_table(["class", "taken for", "examples", "of the class"], rows))
    worst = np.argsort(recall, kind="stable")[:60]
    parts.append(
        Bars(
            "Classes that are recognised least",
            "class",
            "recognised",
            [names[k] for k in worst],
            [float(recall[k]) for k in worst],
            percent=True,
        )
    )
    return parts


def _matrix(counts: Any, names: list[str], recall: Any) -> Markup:
    """The confusion matrix as a table, shaded by each row's shares."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    head = [tag("th", "class", scope="col")]
    head += [tag("th", name, scope="col") for name in names]
    head.append(tag("th", "recognised", scope="col"))
    rows = []
    for i, name in enumerate(names):
        cells = [
            tag(
                "td",
                f"{count:,}" if count else "·",
                class_="right" if i == j else None,
                style=f"--share:{shares[i, j]:.3f}",
            )
            for j, count in enumerate(counts[i])
        ]
        total = tag("td", brief(float(recall[i]), True), class_="sum")
        rows.append(tag("tr", tag("th", name, scope="row"), *cells, total))
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_="matrix")
    return tag(
        "div", table, class_="scroll", tabindex=0, role="region", aria_label="Confusion matrix"
    )


def _scatter(test: Mapping[str, Any]) -> Chart:
    """Predictions against the truth, binned."""
    return Heat(
        "Predicted against true values",
        x="true value",
        y="predicted",
        labels=test["predicted"],
        columns=test["true"],
        values=test["shares"],
        about="Each column's test examples by what was predicted for them.",
        ticks=True,
    )


def _releases(record: RunRecord) -> list[Markup | Chart | str]:
    charts: list[Chart] = list(release_curves(record))
    bound = record.last("clip-norm")
    if bound is None and not charts:
        return []
    said = "" if bound is None else f"The bound on an update's norm was {brief(bound)} at the end."
    if record.client_private:
        said += " Norms of single updates are not public, and nothing here was made from them."
    return [said.strip(), *charts]


def _clients(record: RunRecord) -> list[Markup | Chart | str]:
    if record.last("asked") is None:
        return []
    note = tag("p", OPERATORS_FACTS, class_="operator") if record.private else None
    reasons = [column for column in record.columns() if column.startswith("failed-")]
    totals = {
        column: sum(row.get(column, 0) for row in record.rows if math.isfinite(row.get(column, 0)))
        for column in ("asked", "usable", "failed", *reasons)
    }
    happened = [column for column in reasons if totals[column]]
    lines = [
        Line(name.replace("failed-", "failed: "), *record.curve(name))
        for name in ("asked", "usable", *happened[:6])
    ]
    if not totals["failed"]:
        lines = lines[:1]
    asked = set(lines[0].y)
    said = (
        f"{brief(totals['asked'])} times a client was asked, and {brief(totals['usable'])} times "
        f"its work was usable; it failed {brief(totals['failed'])} times."
    )
    rows = [[column.removeprefix("failed-"), brief(totals[column])] for column in happened]
    table = numbers_table(["reason", "times"], rows) if rows else None
    chart = Lines("Clients of each round", "round", "clients", lines, counts=True)
    if len(lines) == 1 and len(asked) == 1:
        return [
            part for part in (note, f"{brief(asked.pop())} clients in every round. " + said) if part
        ]
    return [part for part in (note, said, table, chart) if part is not None]


def _partition(record: RunRecord) -> list[Markup | Chart | str]:
    dealt = record.summary.get("partition")
    if not dealt:
        if record.private:
            return [
                "Not shown: in a private run what clients' data are like is covered "
                "(evaluate.unprotected = true would show it)."
            ]
        return []
    note = None
    if record.private:
        note = tag(
            "p",
            "Made from clients' data without noise (evaluate.unprotected): not covered.",
            class_="operator",
        )
    sizes = dealt["sizes"]
    charts: list[Chart] = [
        Bars("Examples a client", "examples", "clients", sizes["labels"], sizes["counts"])
    ]
    if classes := dealt.get("classes"):
        charts.append(
            Bars("Classes a client", "classes", "clients", classes["labels"], classes["counts"])
        )
    if mixes := dealt.get("mixes"):
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
    charts += client_spreads(record)
    return [part for part in (note, dealt["said"], *charts) if part is not None]


def _time(record: RunRecord) -> list[Markup | Chart | str]:
    summary = record.summary
    facts: dict[str, str] = {}
    if y := record.curve("seconds")[1]:
        facts["all rounds"] = duration(math.fsum(y))
        facts["a round"] = f"{duration(float(np.median(y)))} (median)"
    if memory := summary.get("peak-memory"):
        facts["most memory"] = size(memory)
    if memory := summary.get("peak-gpu-memory"):
        facts["most GPU memory"] = size(memory)
    for name, value in {**summary.get("machine", {}), **summary.get("versions", {})}.items():
        facts[name] = str(value)
    if not facts:
        return []
    note = tag("p", OPERATORS_FACTS, class_="operator") if record.private else None
    charts = [
        Lines(
            title,
            "round",
            unit,
            [Line(name, *record.curve(column)) for column, name in lines],
            bytes=unit == "bytes",
        )
        for title, unit, lines in _TIMES
        if all(record.curve(column)[1] for column, _ in lines)
    ]
    return [part for part in (note, _facts(facts), *charts) if part is not None]


_TIMES = (
    ("Seconds a round", "seconds", (("seconds", "seconds"),)),
    ("Seconds that a round of devices would take", "seconds", (("virtual-seconds", "seconds"),)),
    ("Bytes that a round would move", "bytes", (("bytes-down", "to them"), ("bytes-up", "back"))),
)


def _facts(facts: Mapping[str, str]) -> Markup:
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", fact)) for name, fact in facts.items()
    ]
    return tag("table", tag("tbody", *rows), class_="facts")


def _config(record: RunRecord) -> list[Markup | Chart | str]:
    usual = RunConfig().to_run_config()
    other = {
        key: str(value)
        for key, value in record.config.items()
        if value != usual.get(key) and value != ""
    }
    tree: dict[str, Any] = {}
    for key, value in record.config.items():
        *tables, last = key.split(".")
        branch = tree
        for table in tables:
            branch = branch.setdefault(table, {})
        branch[last] = value
    return [
        "What differs from the defaults:",
        _facts(other),
        tag(
            "details",
            tag("summary", "The whole config, as resolved (config.toml)"),
            tag("pre", tomli_w.dumps(tree)),
        ),
    ]

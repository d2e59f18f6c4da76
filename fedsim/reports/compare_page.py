"""Comparison of several runs on one page; runs that differ only in their seeds are grouped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedsim.config import RunConfig, Scalar
from fedsim.config.release_keys import path_keys
from fedsim.reports.charts import Cell, Lines, PageTable, metric_chart
from fedsim.reports.page import render
from fedsim.reports.plots import SERIES
from fedsim.reports.seed_groups import SeedGroup, Spread
from fedsim.runs.metrics import (
    display_name,
    duration,
    is_lower_better,
    learning_columns,
)
from fedsim.runs.record import RunRecord

# Keys that are ignored when runs are compared for being equal but for their seeds.
_IGNORED = ("name", "title", "seed", *path_keys(RunConfig(), "location", "operator"))
_IGNORED_TABLES = ("engine.", "checkpoint.", "log.")
_RESOLVED = ("client.path", "client.kernel", "client.block-size")

_MAX_KEYS = 4  # in a group's label


def compare_page(records: Sequence[RunRecord], labels: Mapping[Path, str] | None = None) -> str:
    """The page of several runs, as one self-contained HTML file.

    ``labels`` are names by runs' directories, instead of the keys in which configs differ.
    """
    groups = [
        replace(group, label=(labels or {}).get(group.records[0].path, group.label))
        for group in grouped(records)
    ]
    # Means are taken over the runs that have ended, if a group has any.
    ended_groups = [group.ended if group.ended.records else group for group in groups]
    return render(
        "compare.html",
        title=f"{len(records)} runs compared" if len(records) > 1 else "1 run",
        summary=_summary(records, groups),
        several_seeds=any(len(group.seeds) > 1 for group in ended_groups),
        several_runs=any(len(group.records) > 1 for group in ended_groups),
        several_private=sum(record.last("epsilon") is not None for record in records) > 1,
        left_out=len(records) - sum(len(group.records) for group in ended_groups),
        diverged=sum(_diverged(record) for group in ended_groups for record in group.records),
        results=_results(ended_groups),
        curves=_curves(ended_groups),
        differences=_differences(groups),
        runs=_runs_table(records),
    )


def grouped(records: Iterable[RunRecord]) -> list[SeedGroup]:
    """Group runs whose settings are equal but for seeds, in the order given."""
    by_settings: dict[tuple[tuple[str, Scalar], ...], list[RunRecord]] = {}
    for record in records:
        settings = {key: value for key, value in record.config.items() if _counts(key)}
        settings["objects"] = _objects(record)
        by_settings.setdefault(tuple(sorted(settings.items())), []).append(record)
    settings_of = [dict(settings) for settings in by_settings]
    keys = list(dict.fromkeys(key for settings in settings_of for key in settings))
    differing = [
        key for key in keys if len({repr(settings.get(key, "")) for settings in settings_of}) > 1
    ]
    groups = [
        SeedGroup("", {key: settings[key] for key in differing if key in settings}, group)
        for settings, group in zip(settings_of, by_settings.values(), strict=True)
    ]
    labels = [_label(group, groups) for group in groups]
    return [
        replace(
            group,
            # Groups with equal labels are distinguished by their first run's directory.
            label=label if labels.count(label) == 1 else f"{label} ({group.records[0].path.name})",
        )
        for group, label in zip(groups, labels, strict=True)
    ]


def _objects(record: RunRecord) -> Scalar:
    """Description of the run's objects from Python, for comparison with other runs."""
    if record.objects and "objects" not in record.config:
        # A run of an earlier version, which did not describe them: it equals no other run.
        return f"{', '.join(record.objects)} of {record.path}"
    return record.config.get("objects", "")


def _counts(key: str) -> bool:
    return key not in _IGNORED + _RESOLVED and not key.startswith(_IGNORED_TABLES)


def _label(group: SeedGroup, groups: Sequence[SeedGroup]) -> str:
    """The group's name, or the keys in which it differs from other groups of this name."""
    name = group.records[0].name
    peers = [other for other in groups if other.records[0].name == name]
    keys = [
        key for key in group.point if len({repr(other.point.get(key, "")) for other in peers}) > 1
    ]
    if not keys or len(keys) > _MAX_KEYS:
        return name
    settings = ", ".join(f"{key} {_value(group.point[key])}" for key in keys)
    return settings if len(peers) == len(groups) else f"{name}: {settings}"


def _value(value: Scalar | None) -> str:
    if value == "" or value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()  # as configs write it
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _summary(records: Sequence[RunRecord], groups: Sequence[SeedGroup]) -> str:
    many = len(groups)
    if len(records) == 1:
        return "One run."
    sentence = (
        f"{len(records)} runs of {many} configs; those of one config differ in their seeds only."
    )
    if many == 1:
        sentence = f"{len(records)} runs of one config, which differ in their seeds only."
    repeated = [
        group
        for group in groups
        if len(group.seeds) < len(group.records)
        # With system entropy, runs with equal seeds still have different noise and samples.
        and group.records[0].config.get("noise.entropy") != "system"
    ]
    if repeated:
        sentence += (
            f" Of {', '.join(group.label for group in repeated)} several have the same seed: they "
            "repeat one run, or differ in something outside the config, and are not replicates."
        )
    if any(_objects(group.records[0]) for group in groups):
        sentence += (
            " Objects from Python are compared by class, settings and shapes, not by a model's "
            "initial values or by the examples in data."
        )
    return sentence


def _metrics(groups: Sequence[SeedGroup]) -> dict[str, str]:
    """Column of each metric, by its name: that on test examples if any run has it."""
    columns: dict[str, str] = {}
    for group in groups:
        for record in group.records:
            for name, places in learning_columns(record.columns()).items():
                column = places.get("test") or next(iter(places.values()))
                if columns.get(name, "").startswith("test-"):
                    continue
                columns[name] = column
    return dict(sorted(columns.items(), key=lambda item: is_lower_better(item[0])))


def _diverged(record: RunRecord) -> bool:
    """Whether the last value of any metric is not finite."""
    places = learning_columns(record.columns()).values()
    ends = (record.last(column) for columns in places for column in columns.values())
    return any(end is not None and not math.isfinite(end) for end in ends)


def _results(groups: Sequence[SeedGroup]) -> PageTable:
    """Table of final results, one row per group."""
    metrics = _metrics(groups)
    epsilons = {
        name: column
        for name, column in (("epsilon", "epsilon"), ("examples' epsilon", "example-epsilon"))
        if any(group.spread(column) for group in groups)
    }
    rows: list[list[object]] = []
    for group in groups:
        row: list[object] = [group.label, Cell(str(len(group.records)), len(group.records))]
        row += _metric_cells(group, metrics)
        for column in epsilons.values():
            row.append(_spread_cell(group.spread(column), column, group.marks))
        row.append(_spread_cell(Spread.from_values([r.rounds for r in group.records]), "rounds"))
        seconds = [
            math.fsum(y for y in record.curve("seconds")[1] if math.isfinite(y))
            for record in group.records
        ]
        mean = statistics.fmean(seconds)
        rows.append([*row, Cell(duration(mean), mean)])
    headings = ["config", "runs", *map(display_name, metrics), *epsilons, "rounds", "time"]
    return PageTable(headings, rows, name="Results")


def _metric_cells(group: SeedGroup, metrics: Mapping[str, str]) -> list[Cell]:
    return [_spread_cell(group.spread(column), name) for name, column in metrics.items()]


def _spread_cell(spread: Spread | None, name: str, suffix: str = "") -> Cell:
    return Cell("–") if spread is None else Cell(spread.text(name) + suffix, spread.mean)


def _curves(groups: Sequence[SeedGroup]) -> list[Lines]:
    """One chart per metric and one of epsilon, with at most as many groups as colours."""
    most = len(SERIES)
    charts: list[Lines] = []
    for name, column in [*_metrics(groups).items(), ("epsilon", "epsilon")]:
        lower_is_better = is_lower_better(name) or name == "epsilon"
        means = [(group, s.mean) for group in groups if (s := group.spread(column)) is not None]
        if not means:
            continue
        ranking = sorted(means, key=lambda entry: _rank(entry[1], lower_is_better))
        best = [group for group, _ in ranking[:most]]
        shown = [group for group in groups if group in best]
        lines = [group.mean_curve(column, group.label) for group in shown]
        if name == "epsilon":  # epsilon is 0 before the first round
            lines = [line.from_origin() for line in lines]
        about = f"The best {most} of {len(means)}." if len(means) > most else ""
        if len(shown) == 1 < len(groups):  # one curve has no legend
            about = f"Of {shown[0].label} alone."
        shown_records = [record for group in shown for record in group.records]
        after = SeedGroup("", {}, shown_records).marks if name == "epsilon" else ""
        chart = metric_chart(name, lines, display_name(column, title=True) + after, about=about)
        # The y axis starts at 0, so that small differences between runs do not look large.
        charts.append(replace(chart, y=display_name(name) + after, from_zero=True))
    return charts


def _rank(mean: float, lower_is_better: bool) -> float:
    """Key that sorts means from the best to the worst; NaN is the worst."""
    if math.isnan(mean):
        return math.inf
    return mean if lower_is_better else -mean


def _differences(groups: Sequence[SeedGroup]) -> PageTable | None:
    """Table of the keys in which configs differ: one row per config, or per key if those are more.

    The larger of the two numbers becomes the rows, so that the table is long rather than wide.
    """
    keys = list(dict.fromkeys(key for group in groups for key in group.point))
    if not keys:
        return None
    if len(keys) > len(groups):
        by_key = [[key, *(_value(group.point.get(key)) for group in groups)] for key in keys]
        return PageTable(["key", *(group.label for group in groups)], by_key)
    rows = [[group.label, *(_value(group.point.get(key)) for key in keys)] for group in groups]
    return PageTable(["config", *keys], rows, name="Where configs differ")


def _runs_table(records: Sequence[RunRecord]) -> PageTable:
    alone = [SeedGroup("", {}, [record]) for record in records]
    metrics = _metrics(alone)
    rows = []
    for group, record in zip(alone, records, strict=True):
        planned = record.config.get("rounds", "?")
        made = Cell(f"{record.rounds:,} of {planned}", record.rounds)
        seed = str(record.config.get("seed", "–"))
        rows.append([record.path, seed, *_metric_cells(group, metrics), made, record.outcome.ended])
    headings = ["run", "seed", *map(display_name, metrics), "rounds", "end"]
    return PageTable(headings, rows, name="Every run")

"""Results of a sweep: its runs, its settings over seeds, and the joint privacy cost."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from matplotlib.figure import Figure

from fedsim.config import Scalar
from fedsim.config.plan import planned_releases
from fedsim.privacy import Accountant, Cost
from fedsim.reports.charts import Bars, Line, Lines
from fedsim.reports.pictures import picture
from fedsim.reports.seed_groups import SeedGroup, Spread
from fedsim.runs.callbacks import Measure
from fedsim.runs.data_split import resolve_data
from fedsim.runs.factories import example_privacy
from fedsim.runs.metrics import display_name
from fedsim.runs.record import RunRecord
from fedsim.runs.resolve import calibrated
from fedsim.runs.run_ledgers import RunLedgers, RunOutcome
from fedsim.runs.sweep.grid import Setting, SweepRun


def read_runs(
    grid: Sequence[SweepRun], out: Path, outcomes: Mapping[str, RunOutcome]
) -> list[RunRecord]:
    """Read the runs of a grid from their sweep's directory, each with its outcome.

    A run that failed before it had a directory is a record without rows.
    """
    records = []
    for run in grid:
        path, ledgers = out / run.label, RunLedgers(outcome=outcomes[run.label])
        record = RunRecord(path, run.config.to_run_config(), [], ledgers)
        if (path / "config.toml").is_file():
            record = RunRecord.read(path, ledgers)
        records.append(record)
    return records


def over_seeds(grid: Sequence[SweepRun], records: Sequence[RunRecord]) -> list[SeedGroup]:
    """Group the runs of a grid by setting, in their order."""
    settings: dict[Setting, list[RunRecord]] = {}
    for run, record in zip(grid, records, strict=True):
        settings.setdefault(run.setting, []).append(record)
    return [
        SeedGroup(format_point(point := dict(setting)), point, of_setting)
        for setting, of_setting in settings.items()
    ]


def format_point(point: Mapping[str, Scalar]) -> str:
    """Values on a sweep's axes, as ``key = value`` with commas."""
    return ", ".join(f"{key} = {value}" for key, value in point.items())


def best_setting(settings: Sequence[SeedGroup], measure: Measure) -> SeedGroup | None:
    """The best setting on held-out examples, among those whose seeds all ended.

    None if no examples are held out: settings are never chosen by test examples. None also if the
    metric does not say whether higher is better.
    """
    if measure.higher_is_better is None:
        return None
    best: tuple[float, SeedGroup | None] = (-math.inf, None)
    for setting in settings:
        judged = setting.ended.spread(f"validation-{measure.name}", recent=True)
        if judged is not None and len(setting.ended.records) == len(setting.records):
            score = measure.score(judged.mean)
            best = (score, setting) if math.inf > score > best[0] else best
    return best[1]


def _figures(measure: Measure) -> dict[str, tuple[str, bool]]:
    """Columns of both files: a column of metrics.csv, and whether its last five are averaged."""
    test, validation = (f"{examples}-{measure.name}" for examples in ("test", "validation"))
    return {
        test: (test, False),
        f"{test}-last-five": (test, True),
        "test-loss": ("test-loss", False),
        f"{validation}-last-five": (validation, True),
    }


def to_csv(grid: Sequence[SweepRun], records: Sequence[RunRecord], measure: Measure) -> str:
    """All runs as CSV text; missing values are empty, or NaN on test examples."""
    figures = _figures(measure)
    rows = []
    for run, record in zip(grid, records, strict=True):
        row: list[object] = [*run.point.values(), *record.outcome, record.rounds]
        for column, recent in figures.values():
            value = record.recent(column) if recent else record.last(column)
            missing = math.nan if column.startswith("test-") else None
            row.append(missing if value is None else value)
        epsilon = record.last("epsilon")
        marks = (int(record.last(mark) or 0) for mark in ("simulated", "declared"))
        rows.append([*row, epsilon, *(None if epsilon is None else mark for mark in marks)])
    heading = [*grid[0].point, "outcome", "reason", "rounds", *figures]
    return _csv([*heading, "epsilon", "simulated", "declared"], rows)


def seeds_csv(settings: Sequence[SeedGroup], measure: Measure) -> str:
    """All settings as CSV text: means and standard deviations over seeds."""
    figures = _figures(measure)
    rows = []
    for setting in settings:
        ended = setting.ended
        row: list[object] = [*setting.point.values(), len(setting.records), len(ended.records)]
        for column, recent in figures.values():
            spread = ended.spread(column, recent=recent)
            row += [None, None] if spread is None else [spread.mean, spread.std]
        rows.append(row)
    ends = [f"{column}-{end}" for column in figures for end in ("mean", "std")]
    return _csv([*settings[0].point, "seeds", "ended", *ends], rows)


def _csv(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(heading)
    writer.writerows([["" if value is None else value for value in row] for row in rows])
    return text.getvalue()


def joint_cost(runs: Sequence[SweepRun], delta: float) -> Cost:
    """Joint cost of all that these runs plan to release of whole clients, at ``delta``."""
    events = [event for run in runs for event in planned_releases(calibrated(run.config))]
    return Accountant(events).cost(delta)


def joint_example_cost(runs: Sequence[SweepRun], delta: float) -> Cost:
    """Joint cost at example level of all rounds that these runs plan, for the costliest client.

    The runs assign the same examples to a client, which is assumed to be in every round.
    """
    data = resolve_data(runs[0].config)
    totals: dict[int, Accountant] = {size: Accountant() for size in data.sizes}
    for run in runs:
        privacy, work = example_privacy(run.config, data), run.config.client.make_work()
        for size, total in totals.items():
            if privacy is not None and (plan := privacy.plan(work, size)) is not None:
                total.add(plan.event().over_rounds(run.config.rounds))
    costs = [total.cost(delta) for total in totals.values()]
    return max(costs, key=lambda cost: cost.epsilon, default=Accountant().cost(delta))


def draw(settings: Sequence[SeedGroup], measure: Measure, axis: str, title: str) -> Figure:
    """Draw the metric on test examples over one axis, a curve for each point of the others.

    Parameters
    ----------
    settings : sequence of SeedGroup
        Settings whose runs all failed are left out.
    measure : Measure
    axis : str
        Key on the x axis; the seed only if it is the only axis, and then nothing is averaged.
    title : str
    """
    column = f"test-{measure.name}"
    shown = _numbers_of(settings, column, axis)
    y = f"{display_name(column)}, mean of the last five"
    about = _about(settings, [spread for _, _, spread in shown])
    values = [value for value, _, _ in shown]
    if any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        labels = [f"{value} {others}".strip() for value, others, _ in shown]
        means, errors = [s.mean for *_, s in shown], [s.std or 0.0 for *_, s in shown]
        return picture([Bars(title, axis, y, labels, means, about, errors=errors)], title)
    curves: dict[str, list[tuple[float, Spread]]] = {}
    for value, others, spread in shown:
        curves.setdefault(others, []).append((float(value), spread))
    x = [float(value) for value in values]
    log_x = bool(x) and min(x) > 0 and max(x) / min(x) >= 20
    lines = [_curve(name, sorted(curve, key=itemgetter(0))) for name, curve in curves.items()]
    return picture([Lines(title, axis, y, lines, about, log_x=log_x)], title)


def _curve(name: str, points: Sequence[tuple[float, Spread]]) -> Line:
    x, means = [place for place, _ in points], [spread.mean for _, spread in points]
    if all(spread.std is None for _, spread in points):
        return Line(name, x, means)
    low, high = ([s.mean + sign * (s.std or 0.0) for _, s in points] for sign in (-1, 1))
    return Line(name, x, means, low, high)


def _numbers_of(
    settings: Sequence[SeedGroup], column: str, axis: str
) -> list[tuple[Scalar, str, Spread]]:
    """Value on the axis, the other axes' values as text, and the metric, for each point."""
    if axis == "seed":
        settings = [
            replace(setting, point={**setting.point, "seed": one.config["seed"]}, records=[one])
            for setting in settings
            for one in setting.records
        ]
    return [
        (
            setting.point[axis],
            format_point({key: value for key, value in setting.point.items() if key != axis}),
            spread,
        )
        for setting in settings
        if (spread := setting.ended.spread(column, recent=True)) is not None
    ]


def _about(settings: Sequence[SeedGroup], spreads: Sequence[Spread]) -> str:
    """Note on the error bars and on the runs left out."""
    counts = sorted({spread.count for spread in spreads if spread.count > 1})
    about = ""
    if counts:
        seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        about = f"mean of {seeds} seeds, one standard deviation to either side"
    missing = sum(len(setting.records) - len(setting.ended.records) for setting in settings)
    if missing:
        about += f"{'; ' * bool(about)}{missing} runs that failed are left out"
    return about

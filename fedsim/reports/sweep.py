"""Results of a sweep: its runs, its settings over seeds, and the joint privacy cost."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from fedsim.config import Scalar
from fedsim.privacy import Accountant, ClientLedgers, Cost, Ledger
from fedsim.privacy.claims import Stopping, shared_cost
from fedsim.privacy.entry import History
from fedsim.reports.plots import SERIES, curve_style, grid
from fedsim.reports.seed_groups import SeedGroup, Spread
from fedsim.runs.callbacks import Measure
from fedsim.runs.metrics import display_name
from fedsim.runs.record import RunRecord
from fedsim.runs.run_ledgers import Ending, RunLedgers
from fedsim.runs.sweep.search import Setting, SweepRun


def read_runs(
    grid: Sequence[SweepRun], out: Path, outcomes: Mapping[str, Ending]
) -> list[RunRecord]:
    """Read the runs of a grid from their sweep's directory, each with its outcome.

    A run that failed before it had a directory is a record without rows.
    """
    records = []
    for run in grid:
        path, ledgers = out / run.label, RunLedgers(ending=outcomes[run.label])
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
        SeedGroup(words_of(point := dict(setting)), point, of_setting)
        for setting, of_setting in settings.items()
    ]


def words_of(point: Mapping[str, Scalar]) -> str:
    """Values on a sweep's axes, as ``key = value`` with commas."""
    return ", ".join(f"{key} = {value}" for key, value in point.items())


def best_of(settings: Sequence[SeedGroup], measure: Measure) -> SeedGroup | None:
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
        row: list[object] = [*run.point.values(), *record.ending, record.rounds]
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


def joint_cost(planned: Mapping[Path, Stopping], delta: float, outcomes: int = 1) -> Cost:
    """Joint cost of all runs: the composition of all their releases, at ``delta``.

    Parameters
    ----------
    planned : mapping of path to Stopping
        Each run's ledger, and all that it might have released (`all_planned_releases`).
    delta : float
    outcomes : int
        Number of possible compositions from which the releases selected this one (halving); see
        `shared_cost`.
    """
    joint = JointCost()
    for path, stopping in planned.items():
        ledger = Ledger.read(path)
        joint.add(ledger.history, stopping.after(ledger.rounds_made), [None])
    return joint.cost(delta, outcomes)


def joint_example_cost(
    planned: Mapping[Path, int],
    delta: float,
    outcomes: int = 1,
    *,
    same_examples: bool = True,
    runs: Collection[str | None] = (),
) -> Cost:
    """Joint cost of all runs at example level, for the client that spends most.

    Parameters
    ----------
    planned : mapping of path to int
        Directories of clients' ledgers, and how many more rounds each might have had.
    delta : float
    outcomes : int
        See `joint_cost`.
    same_examples : bool
        Whether a client has the same examples in all of these directories. If not, an example may
        belong to the client that spends most in each of them, so these clients are composed.
    runs : collection of str
        Names of the runs, as clients' ledgers have them: these also hold other runs' lines.
    """
    clients: dict[int | None, JointCost] = {}
    for directory, left in planned.items():
        opened = ClientLedgers(directory, delta=delta, read_only=True)
        ledgers = opened.with_releases()
        for ledger in ledgers if same_examples or not ledgers else [opened.worst()]:
            # None: the worst clients of all directories make one composition.
            key = ledger.charged[-1].client if same_examples else None
            made = ledger.charged[-1].round or 0 if ledger.charged else 0
            stopping = Stopping(rounds_left=max(left, 0), rounds_made=made)
            clients.setdefault(key, JointCost()).add(ledger.history, stopping, runs)
    costs = [joint.cost(delta, outcomes) for joint in clients.values()]
    return max(costs, key=lambda cost: cost.epsilon, default=Accountant().cost(delta))


class JointCost:
    """Composition of several ledgers, and of all that they might have contained.

    Three accountants: ``_spent`` has the releases that were made; ``_charged`` also has planned
    ones that a ledger charges because its releases ended the run early; ``_planned`` also has all
    that was still planned. The latter two are what `shared_cost` compares.
    """

    def __init__(self) -> None:
        self._spent, self._charged, self._planned = Accountant(), Accountant(), Accountant()

    def add(self, history: History, stopping: Stopping, runs: Collection[str | None]) -> None:
        """Add a ledger's events, and the releases that were still planned in these runs."""
        net, before = history.effective, len(history.archived)
        for index, entry in enumerate(net):
            self._charged.add(entry.event)
            self._planned.add(entry.event)
            if entry.kind != "planned" or index < before or entry.run not in runs:
                self._spent.add(entry.event)
        for event in stopping.further(history):
            self._planned.add(event)

    def cost(self, delta: float, outcomes: int) -> Cost:
        """Cost of all ledgers together; see `joint_cost`."""
        if outcomes == 1:
            return self._charged.cost(delta)
        return shared_cost(self._spent, self._planned, delta, outcomes)


def draw(
    settings: Sequence[SeedGroup], measure: Measure, axis: str, title: str, *, joined: bool = True
) -> Figure:
    """Draw the metric on test examples over one axis.

    Parameters
    ----------
    settings : sequence of SeedGroup
        Settings whose runs all failed are left out.
    measure : Measure
    axis : str
        Key on the x axis; the seed only if it is the only axis, and then nothing is averaged.
    title : str
    joined : bool
        Whether to join settings with equal values on the other axes by a curve.
    """
    figure, (axes,) = grid(1, 1, title=title, width=7.0, height=4.4)
    column = f"test-{measure.name}"
    shown = _numbers_of(settings, column, axis)
    values = list(dict.fromkeys(value for value, _, _ in shown))
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    places = {value: float(value) if numeric else index for index, value in enumerate(values)}
    curves: dict[str, list[tuple[float, Spread]]] = {}
    for value, others, spread in shown:
        curves.setdefault(others if joined else "", []).append((places[value], spread))
    for index, (name, curve) in enumerate(curves.items()):
        x = [place for place, _ in sorted(curve, key=lambda point: point[0])]
        ordered = [spread for _, spread in sorted(curve, key=lambda point: point[0])]
        style = curve_style(SERIES[index % len(SERIES)])
        style |= {} if joined else {"linestyle": "none", "markevery": 1}
        y, bars = [s.mean for s in ordered], [s.std or 0.0 for s in ordered]
        axes.errorbar(x, y, bars, **style, capsize=3, label=name or None)
    x = list(places.values())
    if numeric and x and min(x) > 0 and max(x) / min(x) >= 20:
        axes.set_xscale("log")
    if not numeric:
        axes.set_xticks(x, [str(value) for value in values])
    axes.set_xlabel(axis)
    axes.set_ylabel(f"{display_name(column)}, mean of the last evaluations (at most five)")
    axes.set_title(_about(settings, [spread for _, _, spread in shown]), fontsize=9, loc="left")
    if any(curves):
        axes.legend(fontsize=8, frameon=False)
    return figure


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
            words_of({key: value for key, value in setting.point.items() if key != axis}),
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
        about = f"mean of {seeds} seeds; bars: one standard deviation on either side"
    missing = sum(len(setting.records) - len(setting.ended.records) for setting in settings)
    if missing:
        about += f"{'; ' * bool(about)}{missing} runs that failed or were dropped are left out"
    return about

"""Results of a sweep: its runs, its settings averaged over seeds, and the joint privacy cost."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from matplotlib.figure import Figure

from fedsim.config import Scalar
from fedsim.privacy import Accountant, ClientLedgers, Cost, Ledger
from fedsim.privacy.claims import Stopping, shared_cost
from fedsim.privacy.entry import History
from fedsim.reports.plots import SERIES, curve_style, grid
from fedsim.runs.callbacks import Measure
from fedsim.runs.directory import Ending
from fedsim.runs.metrics import MetricsFile, display_name, last_evaluations
from fedsim.runs.sweep.search import Spread, validated

_FINISHED = Ending("finished")


@dataclass(frozen=True)
class RunLine:
    """Results of one run.

    Attributes
    ----------
    point : mapping of key to value
        The run's values on the sweep's axes.
    outcome : Ending
    rounds : int
        Number of finished rounds.
    measure : Measure
        The metric by which runs are compared.
    test, mean_test : float
        The metric on test examples, after the last round and averaged over the last five
        evaluations.
    loss : float
        Loss on test examples after the last round.
    epsilon : float or None
        None for a run that is not private.
    simulated, declared : bool
        Whether its noise follows from its seed, and whether a law is declared by the user.
    validation : float or None
        The metric on held-out examples, averaged over the last five evaluations, by which runs
        are chosen; None if no examples are held out.
    """

    point: dict[str, Scalar]
    outcome: Ending
    rounds: int
    measure: Measure
    test: float
    mean_test: float
    loss: float
    epsilon: float | None = None
    simulated: bool = False
    declared: bool = False
    validation: float | None = None


def read_line(
    point: dict[str, Scalar],
    directory: Path,
    measure: Measure,
    outcome: Ending = _FINISHED,
) -> RunLine:
    """Read the results of a run from its ``directory``; see `RunLine` for other parameters."""
    rows = MetricsFile(directory / "metrics.csv").rows()
    tests, losses = (
        [row[column] for row in rows if column in row]
        for column in (f"test-{measure.name}", "test-loss")
    )
    recent = last_evaluations(rows, f"test-{measure.name}")
    last = rows[-1] if rows else {"round": 0}
    return RunLine(
        point=point,
        outcome=outcome,
        rounds=int(last["round"]),
        measure=measure,
        test=tests[-1] if tests else math.nan,
        mean_test=float(np.mean(recent)) if recent else math.nan,
        loss=losses[-1] if losses else math.nan,
        epsilon=last.get("epsilon"),
        simulated=bool(last.get("simulated")),
        declared=bool(last.get("declared")),
        validation=validated(rows, measure),
    )


@dataclass(frozen=True)
class SeedsLine:
    """Results of one setting over its seeds; means leave out runs that failed or were dropped.

    Attributes
    ----------
    point : mapping of key to value
        Values on the sweep's axes, without the seed.
    lines : sequence of RunLine
        One per seed.
    """

    point: dict[str, Scalar]
    lines: Sequence[RunLine]

    @cached_property
    def ended(self) -> list[RunLine]:
        """Runs that ended as planned, by a stop rule or at their budget."""
        return [
            line for line in self.lines if line.outcome.ended in ("finished", "stopped", "budget")
        ]

    def spread(self, figure: Figures) -> Spread | None:
        """Mean and deviation of a field of `RunLine` over `ended`; None if no run has a value."""
        values = [getattr(line, figure) for line in self.ended]
        return Spread.of([value for value in values if value is not None])


Figures = Literal["test", "mean_test", "loss", "validation"]


def over_seeds(lines: Sequence[RunLine]) -> list[SeedsLine]:
    """Group runs by setting, over seeds, in the order given."""
    settings: dict[tuple[tuple[str, Scalar], ...], list[RunLine]] = {}
    for line in lines:
        point = tuple((key, value) for key, value in line.point.items() if key != "seed")
        settings.setdefault(point, []).append(line)
    return [SeedsLine(dict(point), of_point) for point, of_point in settings.items()]


def best_of(settings: Sequence[SeedsLine]) -> SeedsLine | None:
    """The best setting on held-out examples, among those whose seeds all ended.

    None if no examples are held out: settings are never chosen by test examples. None also if the
    metric does not say whether higher is better.
    """
    if settings[0].lines[0].measure.higher_is_better is None:
        return None
    best: tuple[float, SeedsLine | None] = (-math.inf, None)
    for setting in settings:
        judged = setting.spread("validation")
        if judged is not None and len(setting.ended) == len(setting.lines):
            score = setting.lines[0].measure.score(judged.mean)
            best = (score, setting) if math.inf > score > best[0] else best
    return best[1]


def to_csv(lines: Sequence[RunLine]) -> str:
    """All runs as CSV text; missing values are empty."""
    name = lines[0].measure.name
    figures = [f"test-{name}", f"test-{name}-last-five", "test-loss"]
    figures += [f"validation-{name}-last-five", "epsilon", "simulated", "declared"]
    rows = [
        [
            *line.point.values(),
            *(*line.outcome, line.rounds),
            *(line.test, line.mean_test, line.loss, line.validation, line.epsilon),
            *(None if line.epsilon is None else int(m) for m in (line.simulated, line.declared)),
        ]
        for line in lines
    ]
    return _csv([*lines[0].point, "outcome", "reason", "rounds", *figures], rows)


def seeds_csv(settings: Sequence[SeedsLine]) -> str:
    """All settings as CSV text: means and standard deviations over seeds."""
    name = settings[0].lines[0].measure.name
    columns = [f"test-{name}", f"test-{name}-last-five"]
    columns += ["test-loss", f"validation-{name}-last-five"]
    rows = []
    for setting in settings:
        row: list[object] = [*setting.point.values(), len(setting.lines), len(setting.ended)]
        for figure in get_args(Figures):
            spread = setting.spread(figure)
            row += [None, None] if spread is None else [spread.mean, spread.std]
        rows.append(row)
    ends = [f"{column}-{figure}" for column in columns for figure in ("mean", "std")]
    return _csv([*settings[0].point, "seeds", "ended", *ends], rows)


def _csv(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(heading)
    writer.writerows([["" if value is None else value for value in row] for row in rows])
    return text.getvalue()


def price(planned: Mapping[Path, Stopping], delta: float, outcomes: int = 1) -> Cost:
    """Joint cost of all runs: the composition of all their releases, at ``delta``.

    Parameters
    ----------
    planned : mapping of path to Stopping
        Each run's ledger, and all that it might have released (`fedsim.config.plan.whole_run`).
    delta : float
    outcomes : int
        Number of possible compositions from which the releases selected this one (halving); see
        `shared_cost`.
    """
    together = _Together()
    for path, stopping in planned.items():
        ledger = Ledger.read(path)
        together.take(ledger.history, stopping.after(ledger.rounds_made), [None])
    return together.cost(delta, outcomes)


def examples_price(
    planned: Mapping[Path, int],
    delta: float,
    outcomes: int = 1,
    *,
    same: bool = True,
    runs: Collection[str | None] = (),
) -> Cost:
    """Joint cost of all runs at example level, for the client that spends most.

    Parameters
    ----------
    planned : mapping of path to int
        Directories of clients' ledgers, and how many more rounds each might have had.
    delta : float
    outcomes : int
        See `price`.
    same : bool
        Whether a client has the same examples in all of these directories. If not, an example may
        belong to the client that spends most in each of them, so these clients are composed.
    runs : collection of str
        Names of the runs, as clients' ledgers have them: these also hold other runs' lines.
    """
    clients: dict[int | None, _Together] = {}
    for directory, left in planned.items():
        opened = ClientLedgers(directory, delta=delta, read_only=True)
        ledgers = opened.with_releases()
        for ledger in ledgers if same or not ledgers else [opened.worst()]:
            # None: the worst clients of all directories make one composition.
            key = ledger.charged[-1].client if same else None
            made = ledger.charged[-1].round or 0 if ledger.charged else 0
            stopping = Stopping(rounds_left=max(left, 0), rounds_made=made)
            clients.setdefault(key, _Together()).take(ledger.history, stopping, runs)
    costs = [together.cost(delta, outcomes) for together in clients.values()]
    return max(costs, key=lambda cost: cost.epsilon, default=Accountant().cost(delta))


class _Together:
    """Composition of several ledgers, and of all that they might have contained.

    Three accountants: ``_spent`` has the releases that were made; ``_charged`` also has planned
    ones that a ledger charges because its releases ended the run early; ``_planned`` also has all
    that was still planned. The latter two are what `shared_cost` compares.
    """

    def __init__(self) -> None:
        self._spent, self._charged, self._planned = Accountant(), Accountant(), Accountant()

    def take(self, history: History, stopping: Stopping, runs: Collection[str | None]) -> None:
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
        """Cost of all ledgers together; see `price`."""
        if outcomes == 1:
            return self._charged.cost(delta)
        return shared_cost(self._spent, self._planned, delta, outcomes)


def draw(settings: Sequence[SeedsLine], axis: str, title: str, *, joined: bool = True) -> Figure:
    """Draw the metric on test examples over one axis.

    Parameters
    ----------
    settings : sequence of SeedsLine
        Settings whose runs all failed are left out.
    axis : str
        Key on the x axis; the seed only if it is the only axis, and then nothing is averaged.
    title : str
    joined : bool
        Whether to join settings with equal values on the other axes by a curve.
    """
    figure, (axes,) = grid(1, 1, title=title, width=7.0, height=4.4)
    shown = _numbers_of(settings, axis)
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
    name = display_name(f"test-{settings[0].lines[0].measure.name}")
    axes.set_ylabel(f"{name}, mean of the last five evaluations")
    axes.set_title(_about(settings, [spread for _, _, spread in shown]), fontsize=9, loc="left")
    if any(curves):
        axes.legend(fontsize=8, frameon=False)
    return figure


def _numbers_of(settings: Sequence[SeedsLine], axis: str) -> list[tuple[Scalar, str, Spread]]:
    """Value on the axis, the other axes' values as text, and the metric, for each point."""
    if axis == "seed":
        spreads = [
            (line.point["seed"], _words(setting.point), Spread(line.mean_test, None, 1))
            for setting in settings
            for line in setting.lines
        ]
        return [entry for entry in spreads if np.isfinite(entry[2].mean)]
    return [
        (
            setting.point[axis],
            _words({key: value for key, value in setting.point.items() if key != axis}),
            spread,
        )
        for setting in settings
        if (spread := setting.spread("mean_test")) is not None
    ]


def _words(point: dict[str, Scalar]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in point.items())


def _about(settings: Sequence[SeedsLine], spreads: Sequence[Spread]) -> str:
    """Note on the error bars and on the runs left out."""
    counts = sorted({spread.count for spread in spreads if spread.count > 1})
    about = ""
    if counts:
        seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        about = f"mean of {seeds} seeds; bars: one standard deviation on either side"
    missing = sum(len(setting.lines) - len(setting.ended) for setting in settings)
    if missing:
        about += f"{'; ' * bool(about)}{missing} runs that failed or were dropped are left out"
    return about

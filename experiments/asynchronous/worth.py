"""Virtual time to an accuracy: synchronous, over-selected and buffered asynchronous rounds.

All of them are schedules of one kind, of the same devices at the same hours of the day: who trains
which version when. A synchronous round starts clients from one version and is complete when
``buffer`` of them have handed in; whoever is late is dropped, so that its work is lost. Private
runs are thus charged alike: a public schedule, and each client in at most so many releases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from experiments.framework.base import (
    NOT_EMPTY,
    ExperimentClaim,
    Members,
    Outcome,
    Report,
    Result,
    Table,
)
from experiments.framework.config_runs import ConfigRuns, ConfigRunsSettings, Variant
from experiments.framework.spread import mean_text, over_seeds, paired
from fedsim.array_types import Floats, Ints
from fedsim.config import Scalar
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.buffered.schedule import OpenTimes, ReleaseSchedule
from fedsim.privacy.laws.buffered import Buffered
from fedsim.privacy.laws.sampler import declared_population
from fedsim.reports.plots import INK, SERIES, curve_style, grid
from fedsim.runs.resolve import resolve
from fedsim.runs.runner import drive

HOUR = 3600.0
BEGINS, OPEN_HOURS, MOST_FROM, SPREAD = 18.0, 8.0, 21.0, 4.0
"""Hours of the day: the clock's start; how long a device is available a day; mean and standard
deviation of the hour from which it is."""

MIN_SEEDS = 3
"""Fewest seeds by which a way that never reaches the accuracy is judged."""

CHECKED = 600.0
"""Seconds after which a place without an available client is tried again."""


class Day(OpenTimes):
    """Each device is available for some hours of every day, most of them at night."""

    def __init__(self, population: int, seed: int) -> None:
        self._from = np.random.default_rng([seed, 1]).normal(MOST_FROM, SPREAD, population)

    def available(self, client: int, version: int, time: float) -> bool:
        """Whether the hour is one of the client's."""
        return bool((BEGINS + time / HOUR - self._from[client]) % 24 < OPEN_HOURS)

    def next_change(self, time: float) -> float:
        """The next multiple of ten minutes."""
        return (time // CHECKED + 1) * CHECKED


def synchronous(
    cohort: Buffered, seconds: Floats, seed: int, open_times: OpenTimes
) -> ReleaseSchedule:
    """Rounds that ``concurrency`` clients begin together, of whom the first ``buffer`` count.

    A round begins as soon as so many clients are available and have participations left.
    """
    draws = np.random.default_rng([seed, 2])
    left = np.full(declared_population(cohort), cohort.participations)
    rows: list[tuple[int, int, int, float, float]] = []
    times: list[float] = []
    time = 0.0
    for version in range(cohort.rounds):
        order = draws.permutation(len(left))
        while len(ready := _ready(order, left, open_times, version, time)) < cohort.concurrency:
            if (left > 0).sum() < cohort.concurrency:
                raise FedsimError(
                    f"cohort.participations is {cohort.participations}, and too few clients have "
                    f"any left after {version} of {cohort.rounds} rounds."
                )
            time = open_times.next_change(time)
        clients = np.sort(ready[: cohort.concurrency])
        ends = time + seconds[clients]
        counted = np.argsort(ends, kind="stable")[: cohort.buffer]
        in_release = np.zeros(len(clients), dtype=np.int64)
        in_release[counted] = version + 1
        left[clients] -= 1
        rows += [
            (int(client), version, int(release), time, float(end))
            for client, release, end in zip(clients, in_release, ends, strict=True)
        ]
        time = float(ends[counted[-1]])
        times.append(time)
    ids, versions, releases, starts, all_ends = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    return ReleaseSchedule(cohort, ids, versions, releases, starts, all_ends, np.array(times))


def _ready(order: Ints, left: Ints, open_times: OpenTimes, version: int, time: float) -> list[int]:
    """Clients in this order that have participations left and are available."""
    return [c for c in order.tolist() if left[c] and open_times.available(c, version, time)]


@dataclass(frozen=True, kw_only=True)
class Way(Variant):
    """One way to collect updates.

    Attributes
    ----------
    started : int
        Clients that begin a synchronous round, or train at a time.
    buffer : int
        Updates in a release.
    synchronous : bool
    """

    started: int
    buffer: int
    synchronous: bool = False


@dataclass(frozen=True, kw_only=True)
class WorthSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    title : str
    target : float
        The accuracy to reach.
    updates : int
        Updates of every run.
    every : int
        Updates between two evaluations.
    ways, arms : list
    """

    title: str
    target: float
    updates: int
    every: int
    ways: Annotated[list[Way], NOT_EMPTY]
    arms: Annotated[list[Variant], NOT_EMPTY]


class Worth(ConfigRuns):
    """Every way in every arm, with the same updates; nothing is tuned for any of them."""

    settings: WorthSettings
    partial: ClassVar[bool] = True

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """Every arm's ways."""
        return {
            _name(arm.name, way.name): {
                **arm.keys,
                **way.keys,
                "rounds": self.settings.updates // way.buffer,
                "cohort.concurrency": way.started,
                "cohort.buffer": way.buffer,
                "evaluate.every": max(self.settings.every // way.buffer, 1),
            }
            for arm in self.settings.arms
            for way in self.settings.ways
        }

    def members(self) -> Members:
        """As of `ConfigRuns`, with what no key of a run says."""
        waits = {
            _name(arm.name, way.name): way.synchronous
            for arm in self.settings.arms
            for way in self.settings.ways
        }
        return {
            name: {**settings, "synchronous": waits[name.rpartition(" seed=")[0]]}
            for name, settings in super().members().items()
        }

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Hours of the clock and test accuracy of every evaluated version."""
        resolved = resolve(self.config_of(settings))
        seed, cohort = resolved.config.seed, resolved.plan.sampler
        assert isinstance(cohort, Buffered)
        population = declared_population(cohort)
        made = synchronous if settings["synchronous"] else ReleaseSchedule.of
        seconds = resolved.devices.seconds(np.arange(population))
        resolved.devices.schedule = made(cohort, seconds, seed, Day(population, seed))
        result = drive(resolved, LocalGrid(resolved.trainer))
        hours = np.cumsum([row.get("virtual-seconds", 0.0) for row in result.metrics]) / HOUR
        points = [
            (float(hour), float(row["test-accuracy"]))
            for hour, row in zip(hours, result.metrics, strict=True)
            if "test-accuracy" in row
        ]
        return {
            "hours": [hour for hour, _ in points],
            "accuracy": [accuracy for _, accuracy in points],
            "epsilon": result.privacy.epsilon if resolved.config.protects else None,
            "noise-multiplier": resolved.plan.noise.multiplier,
        }

    def hours_to_target(self, result: Result) -> float:
        """Hours of the clock after which a model first has the accuracy; infinite without one."""
        reached = zip(result["hours"], result["accuracy"], strict=True)
        return next((hour for hour, share in reached if share >= self.settings.target), math.inf)

    def report(self, results: Mapping[str, Result]) -> Report:
        """A table of seconds to the target, accuracy over time, and whether buffers are faster."""
        tables: list[Table] = []
        figures: dict[str, float] = {}
        claims: list[ExperimentClaim] = []
        for arm in self.settings.arms:
            hours = {
                way.name: [
                    self.hours_to_target(result)
                    for result in self.of_plan(results, _name(arm.name, way.name))
                ]
                for way in self.settings.ways
            }
            tables.append(self._table(arm, hours, results))
            first = hours[self.settings.ways[0].name]
            figures |= {
                f"{arm.name}, {way}": ratio
                for way, found in hours.items()
                if (ratio := _ratio(first, found)) is not None
            }
            claims += self._claims(arm, hours)
        return Report(tables, figures, claims, {"accuracy": self._picture(results)})

    def _table(
        self, arm: Variant, hours: Mapping[str, Sequence[float]], results: Mapping[str, Result]
    ) -> Table:
        rows: list[list[str | float | None]] = []
        for way in self.settings.ways:
            found, runs = hours[way.name], self._runs(results, arm, way)
            reached = [hour for hour in found if math.isfinite(hour)]
            row: list[str | float | None] = [way.name, f"{len(reached)} of {len(found)}"]
            row += [_seconds(reached), _ratio(hours[self.settings.ways[0].name], found)]
            row.append(mean_text([100 * one["accuracy"][-1] for one in runs]) if runs else None)
            row.append(mean_text([one["hours"][-1] for one in runs]) if runs else None)
            rows.append(row)
        target, updates = f"{100 * self.settings.target:g} %", f"{self.settings.updates:,} updates"
        columns = [
            arm.name,
            f"runs that reach {target}",
            "virtual seconds to it",
            "times as fast as synchronous",
            f"accuracy (%) after {updates}",
            f"virtual hours of {updates}",
        ]
        return Table(arm.name, f"{self.settings.title}, {arm.name}", columns, rows)

    def _runs(self, results: Mapping[str, Result], arm: Variant, way: Way) -> list[Result]:
        return self.of_plan(results, _name(arm.name, way.name))

    def _claims(self, arm: Variant, hours: Mapping[str, Sequence[float]]) -> list[ExperimentClaim]:
        """Each buffer at the usual server rate against both kinds of synchronous rounds."""
        ways, target = self.settings.ways, f"{100 * self.settings.target:g} %"
        return [
            ExperimentClaim(
                "-".join(
                    [
                        *arm.name.split(),
                        f"{way.buffer}",
                        "all" if other.started == other.buffer else "first",
                    ]
                ),
                arm.name,
                f"{way.name} is sooner at {target} than {other.name}",
                *self._sooner(hours[way.name], hours[other.name]),
            )
            for other in ways
            for way in ways
            if other.synchronous and not way.synchronous and not way.keys
        ]

    def _sooner(self, fast: Sequence[float], slow: Sequence[float]) -> Outcome:
        """Whether the first times are shorter, by the logarithm of their ratio, and by how much."""
        pairs = np.array(list(zip(slow, fast, strict=False)))
        if not len(pairs):
            return None, "not run"
        reached = np.isfinite(pairs)
        if not reached.all():
            some = f"{reached[:, 1].sum()} and {reached[:, 0].sum()} of {len(pairs)} runs reach it"
            never = bool(reached[:, 0].all() and not reached[:, 1].any())
            return (False if never and len(pairs) >= MIN_SEEDS else None), some
        gain = paired(*np.log(pairs).T.tolist())
        low, high = np.exp(gain.low), np.exp(gain.high)
        return gain.positive, f"{np.exp(gain.mean):.2f} times as fast [{low:.2f}, {high:.2f}]"

    def _picture(self, results: Mapping[str, Result]) -> Figure:
        """Accuracy over the devices' time, a panel an arm; bands are one s.d. over seeds."""
        settings = self.settings
        figure, panels = grid(
            1, len(settings.arms), title=settings.title, width=5.2 * len(settings.arms), height=4.9
        )
        drawn: dict[str, Any] = {}
        for panel, arm in zip(panels, settings.arms, strict=True):
            for index, way in enumerate(settings.ways):
                runs = self._runs(results, arm, way)
                if not runs:
                    continue
                # From the first evaluated release of the slowest seed to the end of the fastest.
                first = max(run["hours"][1] for run in runs)
                hours = np.geomspace(first, min(run["hours"][-1] for run in runs), 60)
                curves = np.array([np.interp(hours, r["hours"], r["accuracy"]) for r in runs])
                mean, spread = 100 * curves.mean(0), 100 * curves.std(0, ddof=len(runs) > 1)
                colour = SERIES[index]
                if not way.keys:
                    panel.fill_between(
                        hours, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0
                    )
                (line,) = panel.plot(hours, mean, **curve_style(colour), label=way.name)
                drawn.setdefault(way.name, line)
            panel.axhline(100 * settings.target, color=INK, linewidth=0.8, linestyle=":")
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter(lambda hour, _: f"{hour:g}")
            panel.sharey(panels[0])
            panel.set_title(arm.name, fontsize=10)
            panel.set_xlabel("hours of the devices' clock")
        panels[0].set_ylabel("test accuracy (%); bands: s.d. over seeds")
        figure.legend(
            drawn.values(),
            drawn.keys(),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=8,
        )
        return figure


def _seconds(hours: Sequence[float]) -> str | None:
    """Mean and standard deviation of these hours, in seconds."""
    if not hours:
        return None
    mean, deviation = over_seeds([HOUR * hour for hour in hours])
    return f"{mean:,.0f} ± {deviation:,.0f}" if len(hours) > 1 else f"{mean:,.0f}"


def _ratio(first: Sequence[float], found: Sequence[float]) -> float | None:
    """Geometric mean over seeds of the ratio of times; None if some run does not get there."""
    pairs = list(zip(first, found, strict=False))
    if not pairs or not np.isfinite(pairs).all():
        return None
    return float(np.exp(np.mean([math.log(a / b) for a, b in pairs])))


def _name(arm: str, way: str) -> str:
    return f"{arm}, {way}"

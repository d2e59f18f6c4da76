"""`fedsim sweep`: a grid of runs, trained side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedsim.cli.console import ConfigFile, Output, Overrides
from fedsim.cli.sweep_cost import print_cost
from fedsim.config import RunConfig
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.reports.seed_groups import SeedGroup
    from fedsim.runs.callbacks import Measure
    from fedsim.runs.run_ledgers import RunOutcome
    from fedsim.runs.sweep import SweepRun


SOME_FAILED = 3
"""Exit status of a sweep in which some runs failed."""


def sweep(
    config: ConfigFile,
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="KEY=V1,V2,..",
            help="An axis of the grid: a key and its values, or any other name and TOML files.",
        ),
    ],
    set_: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The sweep's directory; `runs/<name>-sweep` if unset.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(help="The axis of the picture; the first one other than `seed` if unset."),
    ] = None,
) -> None:
    """Run a config with many settings, and compare the results.

    Runs that differ only in rates, seeds, partitions or server settings train side by side in
    common blocks, and end with the same bytes as each would alone:

        fedsim sweep digits.toml --over client.lr=0.1,0.3,1.0 --over seed=1,2,3

    To compare methods, write what each changes into a file, or as tables of one file:

        fedsim sweep digits.toml --over method=fedavg.toml,scaffold.toml --over seed=1,2,3

    Every run has a directory of its own; sweep.csv, sweep-seeds.csv (mean and standard deviation
    over seeds), sweep.html, sweep.png and sweep.pdf compare them. An interrupted sweep is continued
    by starting it again. The exit status is 3 if runs failed; the others are not affected.
    """
    base = _base(config, set_ or [], over)
    # Imported here so that a mistake in the config is reported before torch is loaded.
    from fedsim.privacy.durable import replace
    from fedsim.reports.compare_page import compare_page
    from fedsim.reports.page import write
    from fedsim.reports.plots import save
    from fedsim.reports.sweep import draw, over_seeds, read_runs, seeds_csv, to_csv
    from fedsim.runs.sweep import grid_runs, has_run_ended, parse_axes, sweep_measure

    axes = parse_axes(over)
    grid = grid_runs(base, axes)
    axis = plot or next((key for key in axes if key != "seed"), next(iter(axes)))
    if axis not in axes:
        raise FedsimError(f"--plot is {axis}; it must be an axis: {', '.join(axes)}.")
    where = out or Path("runs") / f"{base.name}-sweep"
    console = Output()
    _check_directory(where, grid)
    if done := sum(has_run_ended(member, where) for member in grid):
        console.print(f"{done} of {len(grid)} runs are already finished.")
    try:
        outcomes = _run(console, grid, where)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Start the sweep again to continue it in {where}.")
        raise typer.Exit(130) from None
    measure = sweep_measure(grid[0].config)
    records = read_runs(grid, where, outcomes)
    settings = over_seeds(grid, records)
    replace(where / "sweep.csv", to_csv(grid, records, measure).encode())
    replace(where / "sweep-seeds.csv", seeds_csv(settings, measure).encode())
    title = f"{base.name}: test {measure.name} over {axis}"
    labels = {record.path: group.label for group in settings for record in group.records}
    page = compare_page([record for record in records if record.rows], labels)
    write(page, where / "sweep.html")
    picture = draw(settings, measure, axis, title)
    for name in ("sweep.png", "sweep.pdf"):
        save(picture, where / name)
    console.print(_table(grid, settings, measure))
    _print_best(console, settings, measure)
    print_cost(console, grid, records, where)
    console.print_files({where / name: purpose for name, purpose in _FILES.items()})
    _end_if_failed(console, outcomes)


_FILES = {
    "sweep.html": "curves, tables and differences on one page",
    "sweep.csv": "one row per run",
    "sweep-seeds.csv": "one row per setting, over its seeds",
    "sweep.png": "the plot",
    "sweep.pdf": "the plot, for a paper",
}


def _base(config: Path, set_: Sequence[str], over: Sequence[str]) -> RunConfig:
    """Load the config; if it is invalid without the axes, with the first value of each axis."""
    try:
        return RunConfig.load(config, set_)
    except FedsimError:
        from fedsim.runs.sweep import changes_at, parse_axes

        with suppress(FedsimError):
            firsts = changes_at({axis: values[0] for axis, values in parse_axes(over).items()})
            return RunConfig.load(config, [*set_, *(f"{k}={v}" for k, v in firsts.items())])
        raise


def _check_directory(where: Path, grid: Sequence[SweepRun]) -> None:
    """Refuse a directory that is not empty and has no run of this sweep."""
    from fedsim.runs.directory import refuse_foreign

    if not any((where / member.label).exists() for member in grid):
        refuse_foreign(where)


def _run(console: Console, grid: Sequence[SweepRun], where: Path) -> Mapping[str, RunOutcome]:
    from fedsim.runs.sweep import has_run_ended, run_sweep

    total = sum(member.config.rounds for member in grid if not has_run_ended(member, where))
    columns = (
        progress.TextColumn("{task.completed}/{task.total} rounds"),
        progress.BarColumn(bar_width=30),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        return run_sweep(grid, where, lambda _, row: bar.advance(task, row["round"] > 0))


def _table(grid: Sequence[SweepRun], settings: Sequence[SeedGroup], measure: Measure) -> Table:
    """One row per setting, the best one in bold; means if there are several seeds."""
    from fedsim.reports.sweep import best_setting
    from fedsim.runs.metrics import LAST_EVALUATIONS, recent_mean

    best, name = best_setting(settings, measure), measure.name
    single = all(len(setting.records) == 1 for setting in settings)
    # Marks that all rows share go into the heading, so that rows fit into 80 columns.
    marks = {setting.marks for setting in settings}
    shared = marks.pop() if len(marks) == 1 else ""
    notes = [] if single else ["mean and standard deviation of the seeds that ended"]
    rows = [record.rows for setting in settings for record in setting.ended.records]
    if any(recent_mean(r, f"test-{name}", least=LAST_EVALUATIONS) is None for r in rows):
        notes.append("last five: mean of five evaluations, or of all if there are fewer")
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption="\n".join(notes)
    )
    points = [run.point for run in grid] if single else [setting.point for setting in settings]
    last = "outcome" if single else "seeds"
    for axis in points[0]:
        table.add_column(axis, justify="right")
    for heading in (name, "last five", f"epsilon{shared}", "loss", last):
        table.add_column(heading, justify="right", no_wrap=True)
    for point, setting in zip(points, settings, strict=True):
        record = max(setting.records, key=lambda record: record.last("epsilon") or 0.0)
        epsilon = record.last("epsilon")
        cell = "-" if epsilon is None else f"{epsilon:.3g}{'' if shared else setting.marks}"
        tests = [_spread(setting, f"test-{name}", name, recent=r) for r in (False, True)]
        figures = *tests, cell, _spread(setting, "test-loss", "loss")
        ended = f"{len(setting.ended.records)} of {len(setting.records)}"
        figures = *figures, record.outcome.ended if single else ended
        table.add_row(*map(str, point.values()), *figures, style="bold" if setting is best else "")
    return table


def _spread(setting: SeedGroup, column: str, name: str, *, recent: bool = False) -> str:
    spread = setting.ended.spread(column, recent=recent)
    return "-" if spread is None else spread.text(name)


def _print_best(console: Console, settings: Sequence[SeedGroup], measure: Measure) -> None:
    from fedsim.reports.sweep import best_setting

    best, column = best_setting(settings, measure), f"validation-{measure.name}"
    if best is not None and len(settings) > 1:
        reached = _spread(best, column, measure.name, recent=True)
        console.print(f"Best by {column}, {reached}: {best.label}.{_doubt(best, settings, column)}")
    elif len(settings) > 1 and measure.higher_is_better is None:
        console.print(
            f"No best setting is named: {measure.name} does not say whether higher is better (an "
            "attribute higher_is_better of its function, True or False)."
        )
    elif len(settings) > 1 and not any(s.ended.spread(column) for s in settings):
        console.print(
            "No best setting is named, since test examples must not choose it; data.validation "
            "holds examples out for that."
        )


def _doubt(best: SeedGroup, settings: Sequence[SeedGroup], column: str) -> str:
    """A sentence if others are as good as the best, as far as the deviation over seeds tells."""
    spreads = {s.label: s.ended.spread(column, recent=True) for s in settings}
    top = spreads.pop(best.label)
    others = {label: spread for label, spread in spreads.items() if spread is not None}
    if top is None or not others:
        return ""
    if top.std is None:
        return " (One seed each: the difference may be chance.)"
    near = [
        label
        for label, spread in others.items()
        if abs(top.mean - spread.mean) <= math.hypot(top.std, spread.std or 0.0)
    ]
    close = f" Within one standard deviation of the difference: {'; '.join(near)}."
    return close if near else ""


def _end_if_failed(console: Console, outcomes: Mapping[str, RunOutcome]) -> None:
    failed = {label: o.why for label, o in outcomes.items() if o.ended == "failed"}
    for label, reason in failed.items():
        console.print(Text(f"{label} failed: {reason}", style="yellow"))
    if failed:
        console.print(f"{len(failed)} of {len(outcomes)} runs failed; the others are complete.")
        raise typer.Exit(SOME_FAILED)

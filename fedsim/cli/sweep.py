"""`fedsim sweep`: a grid of runs in one go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedsim.cli.console import Output
from fedsim.config import RunConfig
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.reports.sweep import MemberLine
    from fedsim.runs.sweep import Member

__all__ = ["sweep"]


def sweep(
    config: Annotated[Path, typer.Argument(help="The TOML file that describes every member.")],
    over: Annotated[
        list[str], typer.Option("--over", metavar="KEY=V1,V2,..", help="An axis of the grid.")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key in every member."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the sweep; `runs/<name>-sweep` if unset.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="The axis of the picture; the first but `seed` if unset.")
    ] = None,
) -> None:
    """Run a grid of configs in one go, and compare what they reach.

    Members that differ only in rates, seeds, partitions or in what the server does train side
    by side, in common blocks, and end with the same bytes as when each is run alone:

        fedsim sweep digits.toml --over client.lr=0.1,0.3,1.0 --over seed=1,2,3

    Every member has the artefacts of a run in a directory of its own; sweep.csv and sweep.png
    compare them. An interrupted sweep goes on where it stopped: finished members are kept.
    """
    base = RunConfig.load(config, set_ or [])
    # Only now: a mistake in the config should not wait for torch.
    from fedsim.reports.plots import save
    from fedsim.reports.sweep import draw, read_line, to_csv
    from fedsim.runs.sweep import is_done, members, parse_axes

    axes = parse_axes(over)
    grid = members(base, axes)
    axis = plot or next((key for key in axes if key != "seed"), next(iter(axes)))
    if axis not in axes:
        raise FedsimError(f"--plot is {axis}; it must be an axis: {', '.join(axes)}.")
    where = out or Path("runs") / f"{base.name}-sweep"
    _check_own(where, grid)
    console = Output()
    kept = sum(is_done(member, where) for member in grid)
    if kept:
        console.print(f"{kept} of {len(grid)} members are there already.")
    try:
        failed = _run(console, grid, where)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Finished members are kept in {where}; run it again.")
        raise typer.Exit(130) from None
    lines = [read_line(member.point, where / member.label) for member in grid]
    (where / "sweep.csv").write_text(to_csv(lines), encoding="utf-8")
    save(draw(lines, axis, f"{base.name}: test accuracy over {axis}"), where / "sweep.png")
    console.print(_table(lines))
    for label, reason in failed.items():
        console.print(Text(f"{label} failed: {reason}", style="yellow"))
    _say_price(console, grid, lines, where)
    console.print(f"{where / 'sweep.csv'}  {where / 'sweep.png'}")


def _check_own(where: Path, grid: Sequence[Member]) -> None:
    """Refuse a directory whose tables and pictures no sweep has made."""
    taken = [name for name in ("sweep.csv", "sweep.png") if (where / name).exists()]
    if taken and not any((where / member.label).exists() for member in grid):
        raise FedsimError(
            f"--out {where} holds {' and '.join(taken)} and no member of this sweep, so that they "
            "may be somebody's own; choose another directory."
        )


def _run(console: Console, grid: Sequence[Member], where: Path) -> dict[str, str]:
    from fedsim.runs.sweep import is_done, run_sweep

    total = sum(member.config.rounds for member in grid if not is_done(member, where))
    columns = (
        progress.TextColumn("{task.completed}/{task.total} rounds"),
        progress.BarColumn(bar_width=30),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        return run_sweep(grid, where, lambda _, row: bar.advance(task, row["round"] > 0))


def _table(lines: Sequence[MemberLine]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for key in lines[0].point:
        table.add_column(key, justify="right")
    for heading in ("accuracy", "last five", "loss", "epsilon"):
        table.add_column(heading, justify="right")
    judged = [line for line in lines if line.validation is not None]
    best = max(judged, key=lambda line: line.validation or 0.0, default=None)
    for line in lines:
        table.add_row(
            *(str(value) for value in line.point.values()),
            f"{line.accuracy:.2%}",
            f"{line.mean_accuracy:.2%}",
            f"{line.loss:.4f}",
            _epsilon(line),
            style="bold" if line is best else "",
        )
    return table


def _epsilon(line: MemberLine) -> str:
    if line.epsilon is None:
        return "-"
    return f"{line.epsilon:.3g}{' (simulated)' * line.simulated}"


def _say_price(
    console: Console, grid: Sequence[Member], lines: Sequence[MemberLine], where: Path
) -> None:
    """What choosing among private members costs."""
    from fedsim.reports.sweep import examples_price, price

    protecting = [member for member in grid if member.config.client.private]
    if len(protecting) > 1:
        delta = max(member.config.client.noise.delta for member in protecting)
        kept = [
            Path(member.config.client.state_dir or where / member.label / "clients")
            for member in protecting
        ]
        console.print(
            f"Whoever sees all {len(protecting)} members whose clients protect their examples has "
            f"seen their composition: epsilon = {examples_price(kept, delta).epsilon:.4g} at delta "
            f"= {delta} (example level), for the client that pays most."
        )
    private = [member for member, line in zip(grid, lines, strict=True) if line.epsilon is not None]
    if len(private) < 2:
        return
    delta = max(member.config.noise.delta for member in private)
    cost = price([where / member.label / "ledger.jsonl" for member in private], delta)
    console.print(
        f"Each private member is (epsilon, {delta:g})-differentially private with the epsilon "
        f"of its line. Whoever sees all {len(private)} of them, as choosing the best does, has "
        f"seen their composition: epsilon = {cost.epsilon:.4g}."
    )
    if any(line.simulated for line in lines):
        console.print(
            "These are simulated: the noise follows from the members' seeds. For real data set "
            "noise.entropy = 'system'.",
            style="yellow",
        )

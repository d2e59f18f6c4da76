"""`fedsim experiment`: reproduce a paper's figure or table.

It is available in a source checkout only. Since this module is imported at every start of the
`fedsim` command, the modules that compute are imported inside functions.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedsim import regular_files
from fedsim.cli.console import Output
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from experiments.framework import Outcome, Report
    from experiments.framework import Table as Data


def experiment(
    name: Annotated[
        str | None, typer.Argument(help="An experiment, or a directory with an experiment.toml.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for results; `runs/experiments/<name>` if unset.")
    ] = None,
    data: Annotated[Path, typer.Option(help="Where data sets are kept.")] = Path("data"),
    seeds: Annotated[int | None, typer.Option(min=1, help="Instead of the file's own.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version, to see that everything works.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 is one a core.")] = 0,
    only: Annotated[
        str,
        typer.Option(metavar="PATTERN", help='Only members whose names match, such as "FedAvg *".'),
    ] = "*",
    limit: Annotated[
        int | None, typer.Option(min=0, help="At most so many members now; 0 runs none.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also members whose results its directory stores.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="engine.KEY=VALUE",
            help="Where members run: engine.device=cuda, or engine.name=ray.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Judge the stored results again; nothing is computed.")
    ] = False,
    store: Annotated[
        bool,
        typer.Option(
            "--store",
            help="Keep results in its directory, all or those so far; with --check, write README "
            "and pictures again.",
        ),
    ] = False,
) -> None:
    """Reproduce a figure or a table of a paper, and say which of its claims are reproduced.

    Without a name, the experiments are listed. An experiment consists of independent members, most
    of them training runs. Only members without a result in its directory or in `--out` are run, so
    that a table can be filled over days and on several machines; `--again` ignores results in the
    directory.

        fedsim experiment quadratic --again
        fedsim experiment das-fmnist --data ./data --workers 2 --again
        fedsim experiment niid-mnist --data ./data --only "FedAvg *" --limit 1 --store
        fedsim experiment niid-mnist --data ./data --set engine.device=cuda --store

    A member that trains has a run's directory, which `fedsim privacy` and `fedsim report` read: in
    `runs/` below `--out`, named by the digest of its settings, which is also in results.json.

    An experiment writes tables (.csv), pictures (.png) and `figures.csv`. To change a setting, copy
    the experiment's directory and give the copy's path instead of the name.

    The command ends with status 1 and a sentence if a verdict is not valid: a best value at its
    grid's edge, too few seeds, or a claim with another verdict than its directory's
    `judgement.toml` states. `--store` keeps the results in the experiment's directory, and writes
    its README and pictures from them; `--check` judges the results that are kept there.
    """
    from experiments.framework import Portion, find, keep, names, run_experiment

    console = Output()
    if name is None:
        for known in names():
            console.print(f"{known:22} {_about(find(known))}", highlight=False)
        return
    directory = find(name)
    if check:
        if store:
            keep(directory)
        _check(console, directory, data)
        return
    if store and (quick or seeds is not None):
        raise FedsimError(
            "--store keeps results of the file's own settings: no --quick, no --seeds."
        )
    where = out or Path("runs") / "experiments" / (directory.name + "-quick" * quick)
    if where.exists() and not where.is_dir():
        raise FedsimError(f"--out {where} is a file; it must be a directory.")
    with _Progress(console) as shown:
        try:
            outcome = run_experiment(
                directory,
                where,
                data=data,
                seeds=seeds,
                quick=quick,
                workers=workers,
                portion=Portion(only, limit, again),
                engine=set_ or (),
                observer=shown.member,
            )
        except KeyboardInterrupt:
            shown.stop()
            console.print(f"Interrupted. Finished members are kept in {where}; run it again.")
            raise typer.Exit(130) from None
    _show(console, outcome, name)
    if store:
        outcome.stored.save(directory)
        keep(directory)
    if not outcome.quick:
        _end(console, outcome.faults)


def _check(console: Output, directory: Path, data: Path) -> None:
    from experiments.framework import NOT_MEASURED, check

    checked = check(directory, data=data)
    if checked.report is not None:
        console.print(_claims(checked.report))
    elif not checked.faults:
        console.print(NOT_MEASURED)
    if checked.unrun:
        console.print(Text(checked.unrun.sentence))
    if checked.unrun and checked.unrun.cells:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("not run (PATTERN)", "runs", "hours of one core"):
            table.add_column(heading, justify="left" if "PATTERN" in heading else "right")
        for _, pattern, runs, hours in checked.unrun.cells:
            table.add_row(Text(pattern), str(runs), f"{hours:,.2f}")
        console.print(table)
        console.print(Text(f'fedsim experiment {directory.name} --only "PATTERN" --store'))
    _end(console, checked.faults)


def _end(console: Output, faults: list[str]) -> None:
    for fault in faults:
        console.print(Text(fault, style="bold red"))
    if faults:
        raise typer.Exit(1)


def _about(directory: Path) -> str:
    """First heading of an experiment's README; empty without one."""
    path = directory / "README.md"
    lines = regular_files.read_text(path).splitlines() if path.is_file() else []
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")


class _Progress:
    """One live line on a terminal; in other output, one line per member."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = progress.Progress(
            progress.TextColumn("{task.completed:>4}/{task.total}"),
            progress.BarColumn(bar_width=24),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("setting up", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop updating the line."""
        self._bar.stop()

    def member(self, name: str, done: int, total: int) -> None:
        """Show a member that has just finished; an empty name is the start."""
        self._bar.update(self._task, completed=done, total=total, description=name)
        if not self._console.is_terminal:
            text = name or ("of earlier runs" if done else "to do")
            self._console.print(f"{done:>4}/{total}  {text}", highlight=False)


def _show(console: Console, outcome: Outcome, name: str) -> None:
    report = outcome.report
    if outcome.missing:
        console.print(
            f"{outcome.missing} members are missing; `fedsim experiment {name}` runs them.",
            highlight=False,
        )
    if report is None:
        return
    for table in report.tables:
        if table.shown:
            console.print(_table(table))
    if outcome.judgement is not None and outcome.judgement.paper:
        console.print(_printed(outcome.judgement.paper, report))
    if report.claims:
        console.print(_claims(report))
    if outcome.quick:
        console.print("This was the quick version: too small to judge the paper by.", style="bold")
    for path in outcome.files:
        console.print(f"  {path}", highlight=False, soft_wrap=True)


def _printed(paper: dict[str, float], report: Report) -> Table:
    table = Table(
        title="Figures that the paper prints",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("figure")
    for column in ("paper", "here"):
        table.add_column(column, justify="right")
    for name, value in paper.items():
        table.add_row(name, _cell(value, 3), _cell(report.figures.get(name), 3))
    return table


def _table(data: Data) -> Table:
    table = Table(
        title=data.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    for k, column in enumerate(data.columns):
        numeric = any(not isinstance(row[k], str | None) for row in data.rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in data.rows:
        table.add_row(*(_cell(value, data.digits) for value in row))
    return table


def _cell(value: str | float | None, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value)
    small = 0 < abs(value) < 10 ** (1 - digits)
    return f"{value:.{max(digits, 2)}g}" if small else f"{value:,.{digits}f}"


def _claims(report: Report) -> Table:
    table = Table(
        title="What the papers say", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for column in ("panel", "claim", "verdict", "here"):
        table.add_column(column)
    styles = {"reproduced": "green", "not reproduced": "yellow", "not decided": "cyan"}
    for claim in report.claims:
        verdict = Text(claim.verdict, style=styles[claim.verdict])
        table.add_row(claim.panel, claim.says, verdict, claim.measured)
    return table

"""Progress and summary of a run, for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Self

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from fedsim.cli.console import JsonLines, file_list
from fedsim.config import RunConfig
from fedsim.federation.round_report import (
    describe_reasons,
    empty_round,
    failures_in,
    reasons_in,
)
from fedsim.process import Closed
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.directory import RunDirectory
from fedsim.runs.metrics import (
    LAST_EVALUATIONS,
    Row,
    brief,
    headline_columns,
    is_share,
    recent_mean,
    row_marks,
)
from fedsim.runs.record import RunResult

_EPSILONS = {"epsilon-so-far": "eps so far", "epsilon": "eps", "example-epsilon": "examples' eps"}

MAX_COLUMNS_SHOWN = 40
"""Columns of a table that are described before a run; a wide table's others are counted."""


def column_table(columns: Sequence[str]) -> Text:
    """What each column of a table became, a line each, of at most `MAX_COLUMNS_SHOWN`."""
    more = len(columns) - MAX_COLUMNS_SHOWN
    lines = [*columns[:MAX_COLUMNS_SHOWN], *([f"and {more:,} more columns"] if more > 0 else [])]
    return Text("\n".join(["Columns:", *(f"  {line}" for line in lines)]))


class Progress(Callback, Closed):
    """One live line on a terminal; in other output, a plain line after each tenth of the rounds.

    On a narrow terminal the last numbers are cut off, never the remaining time.
    """

    def __init__(self, console: Console, config: RunConfig) -> None:
        self._console = console
        self._rounds = config.rounds
        self._shown: dict[str, float | int] = {}
        self._bar = bars.Progress(
            bars.TextColumn("round {task.completed:>4}/{task.total}"),
            bars.BarColumn(bar_width=12 if console.width < 100 else 24),
            bars.TimeRemainingColumn(),
            bars.TextColumn(
                "{task.description}",
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("setting up", total=config.rounds)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def close(self) -> None:
        """Stop updating the line, which stays on the terminal."""
        self._bar.stop()

    def on_start(self, status: RunStatus) -> None:
        """Show what a table's columns became, or the round from which a run is resumed."""
        if status.round:
            self.on_round(status)
        elif status.columns:
            self._console.print(column_table(status.columns))

    def on_round(self, status: RunStatus) -> None:
        """Show the round that has just finished."""
        row = status.row
        # A line that stays says nothing that an earlier round measured.
        self._shown = {**(self._shown if self._console.is_terminal else {}), **row}
        text = "  ".join(f"{label} [bold]{value}[/]" for label, value in self._values())
        if row.get("failed"):
            # Failures come first, so that a narrow terminal does not cut them off.
            text = (
                f"failed [bold]{row['failed']}[/] ({describe_reasons(reasons_in([row]))})  {text}"
            )
        if empty := empty_round(row):
            text = f"[yellow]{empty}[/]  {text}"
        done = int(row["round"])
        self._bar.update(self._task, completed=done, description=text)
        tenth = max(self._rounds // 10, 1)
        if not self._console.is_terminal and (done % tenth == 0 or done == self._rounds):
            self._console.print(
                f"round {done:>4}/{self._rounds}  {text}", markup=True, soft_wrap=True
            )

    def _values(self) -> Iterator[tuple[str, str]]:
        """Labels and numbers; losses come last, where a narrow terminal cuts them off first."""
        shown = headline_columns(self._shown).items()
        metrics, losses = (
            [(column, name) for column, name in shown if name.endswith("loss") == is_loss]
            for is_loss in (False, True)
        )
        yield from map(self._metric, metrics)
        for column, label in _EPSILONS.items():
            if column in self._shown:
                yield label, f"{self._shown[column]:.2f}{row_marks(self._shown)}"
        yield from map(self._metric, losses)
        if "clients-per-second" in self._shown:
            yield "clients/s", f"{self._shown['clients-per-second']:,.0f}"

    def _metric(self, metric: tuple[str, str]) -> tuple[str, str]:
        column, name = metric
        value = self._shown[column]
        if is_share(column, [value]):
            return escape(name), brief(value, percent=True)
        return escape(name), f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.3f}"


class JsonRounds(Callback):
    """Prints a JSON object for each round, and records the run's directory for the last object."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def on_start(self, status: RunStatus) -> None:
        """Record the run's directory."""
        if status.directory is not None:
            self._lines.end_values["directory"] = str(status.directory.path)

    def on_round(self, status: RunStatus) -> None:
        """Print the round's row."""
        self._lines.line("round", status.row)


def summary(config: RunConfig, result: RunResult) -> RenderableType:
    """The metrics that a run reached, five lines on its privacy, and the files that it wrote."""
    # Privacy is claimed if a mechanism is chosen at either level.
    claims = not config.mechanism.name == config.client.mechanism.name == "none"
    lines: list[RenderableType] = [_metrics_table(result.metrics), Text()]
    lines.append(Text("\n".join(result.guarantee)))
    if result.directory is not None:
        lines += [Text(), _files_table(result.directory, claims=claims)]
    if result.notes:
        lines.append(Text("\n" + "\n".join(result.notes)))
    if failures := failures_in(result.metrics):
        lines.append(Text(f"\n{failures}", style="yellow"))
    if result.why:
        lines.append(Text(f"\n{result.why}", style="bold yellow"))
    title = Text(config.title or config.name, "bold")
    return Panel(Group(*lines), title=title, title_align="left", padding=(1, 2))


def interrupted(result: RunResult) -> str:
    """A message with an interrupted run's last round, and commands to resume and to report it."""
    assert result.directory is not None
    run = shlex.quote(str(result.directory.path))
    return (
        f"Interrupted after round {result.rounds}; the model of this round is saved. "
        f"`fedsim run {run} --resume` continues the run, and `fedsim report {run}` writes its page."
    )


def _metrics_table(rows: Sequence[Row]) -> RenderableType:
    """The last value of each metric and the mean of its last five; the loss comes last."""
    headlines = headline_columns(dict.fromkeys(name for row in rows for name in row))
    if not headlines:
        return Text("Nothing was evaluated.")
    table = Table.grid(padding=(0, 2))
    for column, name in sorted(headlines.items(), key=lambda item: item[1].endswith("loss")):
        measured = [row for row in rows if column in row]
        values = [float(row[column]) for row in measured]
        percent = is_share(column, values)
        label = f"test {name}" if column.startswith("test-") else name
        after = f"after round {measured[-1]['round']}"
        table.add_row(label, Text(brief(values[-1], percent), "bold"), after)
        mean = recent_mean(rows, column, least=LAST_EVALUATIONS)
        if mean is not None and not name.endswith("loss"):
            table.add_row("", brief(mean, percent), "mean of the last five evaluations")
    return table


def _files_table(directory: RunDirectory, *, claims: bool) -> RenderableType:
    purposes = {
        directory.report: "curves, statement and config on one page",
        directory.model: "the model",
        directory.metrics: "one row per round",
        directory.client_metrics: "one row per round and client",
        directory.ledger: "every private release" if claims else "every release",
        directory.config: "reproduces this run",
    }
    return file_list({path: words for path, words in purposes.items() if path.exists()})

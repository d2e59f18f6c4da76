"""A run as it goes on and what came of it, for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from fedsim.cli.console import JsonLines
from fedsim.config import RunConfig
from fedsim.federation.round_report import (
    NOISE_ALONE,
    describe_reasons,
    failures_in,
    reasons_in,
    released_noise_alone,
)
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.metrics import Row, brief, headline_columns, is_share, tail_mean
from fedsim.runs.result import RunResult

_EPSILONS = {"epsilon": "eps", "example-epsilon": "examples' eps"}


class Progress(Callback):
    """One live line on a terminal; elsewhere, a plain line for each tenth of the rounds.

    Where the terminal is narrow the numbers are cut off, and never the time that is left.
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

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def on_start(self, status: RunStatus) -> None:
        """Show where a resumed run goes on."""
        if status.round:
            self.on_round(status)

    def on_round(self, status: RunStatus) -> None:
        """Show the round that has just finished."""
        row = status.row
        self._shown |= row
        text = "  ".join(f"{label} [bold]{value}[/]" for label, value in self._told())
        if row.get("failed"):
            # First: what is wrong must not be what is cut off.
            text = (
                f"failed [bold]{row['failed']}[/] ({describe_reasons(reasons_in([row]))})  {text}"
            )
        if released_noise_alone(row):
            text = f"[yellow]{NOISE_ALONE}[/]  {text}"
        done = int(row["round"])
        self._bar.update(self._task, completed=done, description=text)
        tenth = max(self._rounds // 10, 1)
        if not self._console.is_terminal and (done % tenth == 0 or done == self._rounds):
            self._console.print(
                f"round {done:>4}/{self._rounds}  {text}", markup=True, soft_wrap=True
            )

    def _told(self) -> Iterator[tuple[str, str]]:
        """Labels and numbers; losses last, for they are the first to go on a narrow terminal."""
        shown = headline_columns(self._shown).items()
        metrics, losses = (
            [(column, name) for column, name in shown if name.endswith("loss") == is_loss]
            for is_loss in (False, True)
        )
        yield from map(self._metric, metrics)
        simulated = " (simulated)" if self._shown.get("simulated") else ""
        for column, label in _EPSILONS.items():
            if column in self._shown:
                yield label, f"{self._shown[column]:.2f}{simulated}"
        yield from map(self._metric, losses)
        if "clients-per-second" in self._shown:
            yield "clients/s", f"{self._shown['clients-per-second']:,.0f}"

    def _metric(self, metric: tuple[str, str]) -> tuple[str, str]:
        column, name = metric
        value = self._shown[column]
        return escape(name), f"{value:.1%}" if is_share(column, [value]) else f"{value:.3f}"


class JsonRounds(Callback):
    """A JSON object for each round, and where the run is for the one that comes last."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def on_start(self, status: RunStatus) -> None:
        """Know where the run is."""
        if status.directory is not None:
            self._lines.end_values["directory"] = str(status.directory.path)

    def on_round(self, status: RunStatus) -> None:
        """Print the round's row."""
        self._lines.line("round", status.row)


def summary(config: RunConfig, result: RunResult) -> RenderableType:
    """What a run reached, what privacy it kept, and where its artefacts are."""
    lines: list[RenderableType] = [_reached(result.metrics), Text()]
    lines.append(Text(str(result.privacy) if _claims_privacy(config) else _NO_CLAIM))
    if result.example_privacy is not None and result.example_privacy is not result.privacy:
        lines.append(Text(f"\n{result.example_privacy}"))
    if result.directory is not None:
        lines.append(Text())
        lines.append(_artefacts(result, claims=_claims_privacy(config)))
    if result.notes:
        lines.append(Text("\n" + "\n".join(result.notes)))
    if failures := failures_in(result.metrics):
        lines.append(Text(f"\n{failures}", style="yellow"))
    if result.why:
        lines.append(Text(f"\n{result.why}", style="bold yellow"))
    title = Text(config.title or config.name, "bold")
    return Panel(Group(*lines), title=title, title_align="left", padding=(1, 2))


def interrupted(result: RunResult) -> str:
    """How far a run came that was asked to end, and what can be done with it now."""
    assert result.directory is not None
    run = shlex.quote(str(result.directory.path))
    rounds = int(result.metrics[-1]["round"]) if result.metrics else 0
    return (
        f"Interrupted after round {rounds}: the model is that of this round. `fedsim run {run} "
        f"--resume` goes on, and `fedsim report {run}` makes its page."
    )


def _reached(rows: Sequence[Row]) -> RenderableType:
    """The last of every metric, and what it was of late; the loss stands last."""
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
        mean = None if name.endswith("loss") else tail_mean(values)
        if mean is not None:
            table.add_row("", brief(mean, percent), "mean of the last five evaluations")
    return table


_NO_CLAIM = (
    "No privacy is claimed: mechanism.name and client.mechanism.name are 'none', so nothing bounds "
    "or noises what clients send."
)


def _claims_privacy(config: RunConfig) -> bool:
    """Whether anything is to be said of privacy: a bound is chosen at one of the levels."""
    return not config.mechanism.name == config.client.mechanism.name == "none"


def _artefacts(result: RunResult, *, claims: bool) -> RenderableType:
    assert result.directory is not None
    directory = result.directory
    table = Table.grid(padding=(0, 2))
    for path, purpose in (
        (directory.report, "all of it to look at"),
        (directory.model, "the model"),
        (directory.metrics, "a row for each round"),
        (directory.ledger, "every private release" if claims else "every release"),
        (directory.config, "reproduces this run"),
    ):
        if path.exists():
            table.add_row(str(path), purpose)
    return table

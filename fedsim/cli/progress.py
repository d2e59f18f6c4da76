"""A run as it goes on and what came of it, for a terminal."""

from __future__ import annotations

import json
import math
from types import TracebackType
from typing import Self

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from fedsim.config import RunConfig
from fedsim.privacy import Statement
from fedsim.runs.artefacts import Row
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.result import RunResult
from fedsim.strategies.outcome import failures_in, reasons_in, told

__all__ = ["JsonLines", "Progress", "summary"]

_FIELDS = {
    "test-loss": ("loss", "{:.3f}"),
    "test-accuracy": ("accuracy", "{:.1%}"),
    "epsilon": ("epsilon", "{:.2f}"),
    "example-epsilon": ("examples' epsilon", "{:.2f}"),
    "clients-per-second": ("clients/s", "{:,.0f}"),
}


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
        simulated = " (simulated)" if self._shown.get("simulated") else ""
        text = "  ".join(
            f"{label}{simulated * key.endswith('epsilon')} [bold]{form.format(self._shown[key])}[/]"
            for key, (label, form) in _FIELDS.items()
            if key in self._shown
        )
        if row.get("failed"):
            # First: what is wrong must not be what is cut off.
            text = f"failed [bold]{row['failed']}[/] ({told(reasons_in([row]))})  {text}"
        done = int(row["round"])
        self._bar.update(self._task, completed=done, description=text)
        tenth = max(self._rounds // 10, 1)
        if not self._console.is_terminal and (done % tenth == 0 or done == self._rounds):
            self._console.print(
                f"round {done:>4}/{self._rounds}  {text}", markup=True, soft_wrap=True
            )


class JsonLines(Callback):
    """One JSON object a line: each round's row, and at the end how the run has ended."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_round(self, status: RunStatus) -> None:
        """Print the round's row."""
        self._print({"event": "round", **status.row})

    def end(self, result: RunResult) -> None:
        """Print what the run has come to."""
        statements = {"privacy": result.privacy, "example-privacy": result.example_privacy}
        self._print(
            {
                "event": "end",
                "ended": result.ended,
                "why": result.why,
                "directory": None if result.directory is None else str(result.directory.path),
                **{name: _brief(statement) for name, statement in statements.items()},
            }
        )

    def _print(self, value: dict[str, object]) -> None:
        # JSON has no NaN and no infinity.
        told = {k: _finite(v) for k, v in value.items()}
        self._console.print(json.dumps(told), soft_wrap=True)


def _brief(statement: Statement | None) -> dict[str, object] | None:
    if statement is None:
        return None
    names = ("epsilon", "delta", "level", "adjacency")
    return {name: _finite(getattr(statement, name)) for name in names}


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(config: RunConfig, result: RunResult) -> RenderableType:
    """What a run reached, what privacy it kept, and where its artefacts are."""
    rows = [row for row in result.metrics if "test-accuracy" in row]
    lines: list[RenderableType] = []
    if rows:
        lines.append(_accuracy(rows))
    lines.append(Text())
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


def _accuracy(rows: list[Row]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    last = rows[-1]
    reached = Text(f"{last['test-accuracy']:.2%}", "bold")
    table.add_row("test accuracy", reached, f"after round {last['round']}")
    tail = [float(row["test-accuracy"]) for row in rows[-5:]]
    if len(tail) == 5:
        table.add_row("", f"{math.fsum(tail) / 5:.2%}", "mean of the last five evaluations")
    table.add_row("test loss", f"{last['test-loss']:.4f}")
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

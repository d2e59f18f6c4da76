"""The console of every command, and what commands are made of.

What is printed is text, without lines and boxes where nobody reads it on a terminal; a run goes on
without a reader.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast, get_type_hints

from click import Context, Parameter
from click.exceptions import Abort
from rich.console import Console, ConsoleRenderable, RenderHook
from rich.console import Group as Lines
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from fedsim.allowed_code import allow

if TYPE_CHECKING:
    from fedsim.privacy import Statement
    from fedsim.runs.result import RunResult


class Output(Console):
    """A console that takes no markup from names and paths.

    What cannot be written, since the reader is gone or a disk is full, is lost, and the command
    goes on: a run is worth more than its progress. `lost_output` says so afterwards.
    """

    def __init__(self) -> None:
        output = cast(TextIO, _Forgiving(sys.stdout))
        super().__init__(file=output, markup=False, emoji=False, highlight=False)
        if not self.is_terminal:
            self.push_render_hook(_NoBoxes())


class _NoBoxes(RenderHook):
    """Prints tables and panels without lines around them, of which a pipe has no use."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [self._without(renderable) for renderable in renderables]

    def _without(self, renderable: Any) -> Any:
        if isinstance(renderable, Table):
            renderable.box = None
        elif isinstance(renderable, Panel):
            title = [] if renderable.title is None else [renderable.title, Text()]
            return Lines(*title, self._without(renderable.renderable))
        elif isinstance(renderable, Lines):
            return Lines(*map(self._without, renderable.renderables))
        return renderable


_lost: list[OSError] = []


def lost_output() -> OSError | None:
    """Why something that was printed since the last call has been lost, if it has."""
    error = _lost[0] if _lost else None
    _lost.clear()
    return error


def drop_output() -> None:
    """Send what is still to be printed nowhere, so that the interpreter can end in peace."""
    # There may be no standard output, or one without a descriptor.
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Forgiving:
    """A stream whose first failure is noted, and after which all that is written goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        _lost.append(error)
        drop_output()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Command(TyperCommand):
    """A command that shows the help of each `typer.Argument`.

    Click 8.5 has a help of its own for arguments, and overwrites with it the one that typer 0.20
    noted; Flower allows no newer typer.
    """

    def __init__(
        self,
        name: str | None,
        *,
        callback: Callable[..., Any],
        params: list[Any],
        **settings: Any,
    ) -> None:
        hints = get_type_hints(callback, include_extras=True)
        for param in params:
            if isinstance(param, TyperArgument) and param.name is not None:
                (told,) = hints[param.name].__metadata__
                param.help = told.help
        super().__init__(name, callback=callback, params=params, **settings)


class ConfigCommand(Command):
    """A command that runs code which a config, or a run's own, names: it has ``--allow-code``."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.params.append(
            TyperOption(
                param_decls=["--allow-code"],
                metavar="NAME",
                multiple=True,
                expose_value=False,
                callback=_allow_code,
                help="A module or package that the config may name, though it is not under the "
                "current directory; may be given several times.",
            )
        )


def _allow_code(_context: Context, _parameter: Parameter, names: tuple[str, ...]) -> None:
    allow(names)


class Group(TyperGroup):
    """A group that leaves Ctrl-C to the command's boundary; typer itself ends without a word."""

    def invoke(self, ctx: Context) -> Any:
        """Run a subcommand."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Abort from None


class JsonLines:
    """The lines of one command.

    Parameters
    ----------
    console : Console

    Attributes
    ----------
    known : dict
        What the last line will say beside its status, as far as it is known yet.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.known: dict[str, object] = {"directory": None}

    def line(self, event: str, values: Mapping[str, object]) -> None:
        """Print an object."""
        # JSON has no NaN and no infinity.
        told = {name: _finite(value) for name, value in values.items()}
        self._console.print(json.dumps({"event": event, **told}), soft_wrap=True)

    def reached(self, result: RunResult) -> None:
        """Take note of how a run has ended; the rows say what an interrupted one has spent."""
        self.known |= {"ended": result.ended, "why": result.why}
        if result.directory is not None:
            self.known["directory"] = str(result.directory.path)
        if result.ended != "interrupted":
            self.known["privacy"] = _brief(result.privacy)
            self.known["example-privacy"] = _brief(result.example_privacy)

    def end(self, status: int, sentence: str) -> None:
        """Print the last line, of a command that ends with this status and sentence."""
        ended = {0: "finished", 130: "interrupted", 143: "interrupted"}.get(status, "failed")
        last: dict[str, Any] = {"ended": ended, "why": sentence, **self.known, "status": status}
        self.line("end", last if status in (0, 130, 143) else last | {"why": sentence})


def _brief(statement: Statement | None) -> dict[str, object] | None:
    if statement is None:
        return None
    names = ("epsilon", "delta", "level", "adjacency")
    return {name: _finite(getattr(statement, name)) for name in names}


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""The console of every command, and the arguments and checks that several commands share.

Output is plain text: markup in names and paths is not interpreted, and a pipe or a file gets no
boxes. A run does not stop when the reader of its output goes away.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast, get_type_hints

import typer
from click import Context, Parameter
from click import Path as PathType
from click.exceptions import Abort
from rich.console import Console, ConsoleRenderable, RenderHook
from rich.console import Group as Lines
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from fedsim import regular_files
from fedsim.allowed_code import allow
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.privacy import Statement
    from fedsim.runs.record import RunResult


def config_in(source: Path) -> Path:
    """The config of a run, if ``source`` is its directory; otherwise ``source`` itself.

    Raises
    ------
    FedsimError
        If it is another directory.
    """
    if not source.is_dir():
        return source
    config = source / "config.toml"
    for file in (config, source / regular_files.RUN_MARKER):
        if not file.is_file():
            raise FedsimError(
                f"{source} is not a run's directory: it has no {file.name}; give a config, or a "
                "run's directory."
            )
    return config


CONFIG_ARGUMENT: Any = typer.Argument(
    help="The TOML file that describes the run, or a run's directory.",
    callback=lambda source: source and config_in(source),
)
ConfigFile = Annotated[Path, CONFIG_ARGUMENT]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key, such as `client.lr=0.1`; may be given several times.",
    ),
]


def panel_option(panel: str, help_: str, *flags: str, metavar: str | None = None) -> Any:
    """An option that ``--help`` shows in a panel with this title."""
    return typer.Option(*flags, help=help_, metavar=metavar, rich_help_panel=panel)


def check_out(path: Path, suffix: str, option: str = "--out") -> None:
    """Refuse an output file that cannot be written, before the work that produces it.

    Raises
    ------
    FedsimError
        If ``path`` has another suffix, is a directory, or its directory cannot be written.
    """
    if path.suffix.lower() != suffix or path.is_dir():
        raise FedsimError(f"{option} is {path}; it must be a file that ends in {suffix}.")
    if (directory := regular_files.unwritable(path.parent)) is not None:
        raise FedsimError(
            f"{path} cannot be created: {directory} is not a writable directory; choose another "
            f"place with {option}."
        )


class Output(Console):
    """A console that does not interpret markup in names and paths.

    Output that cannot be written, because its reader has closed it or the disk is full, is dropped
    and the command continues, so that a run is not lost for its progress line. `lost_output` then
    returns the error.
    """

    def __init__(self) -> None:
        output = cast(TextIO, _DroppingStream(sys.stdout))
        super().__init__(file=output, markup=False, emoji=False, highlight=False)
        if not self.is_terminal:
            self.push_render_hook(_NoBoxes())

    def print_files(self, purposes: Mapping[Path, str]) -> None:
        """Print a list of files; long paths do not wrap, so that they can be copied."""
        self.print(file_list(purposes), soft_wrap=True)


class _NoBoxes(RenderHook):
    """Prints tables and panels without lines around them."""

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


def file_list(purposes: Mapping[Path, str]) -> Text:
    """Files that a command has written, one a line, each with what it is."""
    width = max(len(str(path)) for path in purposes)
    return Text("\n".join(f"{path!s:<{width}}  {words}" for path, words in purposes.items()))


_lost: list[OSError] = []


def lost_output() -> OSError | None:
    """The first error that lost output since the last call; None if no output was lost."""
    error = _lost[0] if _lost else None
    _lost.clear()
    return error


def drop_output() -> None:
    """Redirect the standard output to /dev/null, so that flushing it cannot fail any more."""
    # sys.stdout may be None, or have no descriptor.
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _DroppingStream:
    """A stream that records a failed write, and drops all output after it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        _lost.append(error)
        drop_output()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _NamedPath(PathType):
    """A path that must not be empty: an unset variable must not mean the current directory."""

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> Any:
        """Convert a non-empty string to a path."""
        if value == "":
            name = (param.opts[0] if param is not None else "").replace("_", "-")
            name = name if name.startswith("-") else name.upper()
            raise FedsimError(f"{name} is empty; it must name a path, which may be '.'.")
        return super().convert(value, param, ctx)


class Command(TyperCommand):
    """A command that shows the help of each `typer.Argument`, and refuses empty paths.

    Click 8.5 sets a help of its own on arguments and so overwrites the one that typer 0.20 set;
    it is restored here, since Flower allows no newer typer.
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
                (argument,) = hints[param.name].__metadata__
                param.help = argument.help
            if isinstance(param.type, PathType):
                param.type = _NamedPath()
        super().__init__(name, callback=callback, params=params, **settings)


class ConfigCommand(Command):
    """A command that may import the code that a config names, with the option --allow-code."""

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
    """A group that leaves Ctrl-C to `fedsim.cli.boundary`; typer would exit without a message."""

    def invoke(self, ctx: Context) -> Any:
        """Run a subcommand; convert KeyboardInterrupt to click's Abort."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Abort from None


class JsonLines:
    """The output of ``--json``: one object per line.

    Parameters
    ----------
    console : Console

    Attributes
    ----------
    end_values : dict
        Values of the last line that are known so far, other than its status.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.end_values: dict[str, object] = {"directory": None}

    def line(self, event: str, values: Mapping[str, object]) -> None:
        """Print an object, with null for NaN and infinite numbers, which JSON lacks."""
        from fedsim.runs.metrics import finite_json

        line = json.dumps({"event": event, **finite_json(values)})
        self._console.print(line, soft_wrap=True)

    def result(self, result: RunResult) -> None:
        """Record how a run ended; if interrupted, without privacy: its rows have what it spent."""
        self.end_values |= {"ended": result.ended, "why": result.why}
        if result.directory is not None:
            self.end_values["directory"] = str(result.directory.path)
        if result.ended != "interrupted":
            self.end_values["privacy"] = _guarantee(result.privacy)
            self.end_values["example-privacy"] = _guarantee(result.example_privacy)

    def end(self, status: int, sentence: str) -> None:
        """Print the last line, for a command that ends with this status and sentence."""
        ended = {0: "finished", 130: "interrupted", 143: "interrupted"}.get(status, "failed")
        last: dict[str, Any] = {"ended": ended, "why": sentence, **self.end_values}
        if ended == "failed":
            last["why"] = sentence
        self.line("end", last | {"status": status})


def _guarantee(statement: Statement | None) -> dict[str, object] | None:
    if statement is None:
        return None
    names = ("epsilon", "delta", "level", "adjacency")
    return {name: getattr(statement, name) for name in names}

"""The console of every command: what it prints is text, and a run goes on without a reader."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Console

__all__ = ["Output", "drop_output", "lost_output"]


class Output(Console):
    """A console that takes no markup from names and paths.

    What cannot be written, since the reader is gone or a disk is full, is lost, and the command
    goes on: a run is worth more than its progress. `lost_output` says so afterwards.
    """

    def __init__(self) -> None:
        output = cast(TextIO, _Forgiving(sys.stdout))
        super().__init__(file=output, markup=False, emoji=False, highlight=False)


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

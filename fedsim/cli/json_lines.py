"""What `fedsim run --json` prints: one object a line, and one at the end whatever the end is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from fedsim.privacy import Statement
    from fedsim.runs.result import RunResult

__all__ = ["JsonLines"]


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

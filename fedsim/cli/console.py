"""The console of every command: what it prints is text, and nobody has to read it."""

from __future__ import annotations

import os
import sys

from rich.console import Console

__all__ = ["Output", "drop_output"]


class Output(Console):
    """A console that takes no markup from names and paths, and outlives its reader."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """Go on in silence: a run is worth more than its progress."""
        self.quiet = True
        drop_output()


def drop_output() -> None:
    """Send what is still to be printed nowhere, so that the interpreter can end in peace."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError, AttributeError):
        pass  # there is no standard output, or none with a descriptor

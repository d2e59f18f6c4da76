"""How a SuperNode tells the SuperExec beside it that there is something to do.

Flower's SuperExec asks once a second, and has to be quick for a quick round: ten of them that ask
four times a second take a seventh of a core all the time. So the SuperNode rings when a message
is there with all that belongs to it. The bell is a named pipe in the directory that the two share,
which nobody else may enter; it says no more than "look", and where nobody rings or nobody hears,
the SuperExec looks once a second as ever.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

__all__ = ["Bell", "ring"]

_PIPE = "task.pipe"


class Bell:
    """Where a SuperExec listens.

    Parameters
    ----------
    directory : path
        A pipe is made there, in place of an earlier one's.
    """

    def __init__(self, directory: Path) -> None:
        pipe = directory / _PIPE
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        # For writing too: a pipe that all its writers have left is at its end, and never waits.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)

    def wait(self, seconds: float) -> None:
        """Sleep until somebody rings, or has rung since the last time; at most so long."""
        if select.select([self._pipe], [], [], seconds)[0]:
            os.read(self._pipe, 1 << 16)


def ring(directory: Path) -> None:
    """Wake the SuperExec that listens there, if one does."""
    with suppress(OSError):
        pipe = os.open(directory / _PIPE, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b".")
        finally:
            os.close(pipe)

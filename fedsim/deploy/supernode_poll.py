"""A SuperNode that asks for messages as often as its federation can answer, and wakes its app.

Run as ``python -m fedsim.deploy.supernode_poll SECONDS ARGUMENTS``, the last as for Flower's
``flower-supernode``. Flower's own asks every three seconds while there is nothing to do, which is
most of a small federation's round, and every half second whether its app has replied.

Beside a SuperNode runs the SuperExec of its app, which asks for a task once a second, and would
have to ask far more often for a quick round: ten of them that ask four times a second take a
seventh of a core all the time. So the SuperNode wakes it when a message has arrived whole: one
byte through a named pipe in the directory that the two share, which nobody else may enter. Where no
byte is sent or nobody reads it, the SuperExec asks once a second as before.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedsim.deploy import flower_replacements

_OFTEN = 0.5
_ANSWERED = 20.0  # questions a second that leave a SuperLink's core most of its time
_PIPE = "task.pipe"


def poll_seconds(clients: int) -> float:
    """Seconds from one question of a node to the next, in a federation of so many clients.

    Examples
    --------
    >>> poll_seconds(10), poll_seconds(60), poll_seconds(1000)
    (0.5, 3.0, 3.0)
    """
    return min(flower_replacements.FLOWERS_POLL, max(_OFTEN, clients / _ANSWERED))


def main(seconds: float, arguments: Sequence[str]) -> None:
    """Run the SuperNode."""
    from flwr.supernode.cli import flower_supernode

    flower_replacements.poll_every(seconds)
    flower_replacements.before_reply_wait(lambda: wake(Path(os.environ["FLWR_HOME"])))
    flower_replacements.retry_soon()
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def wake(directory: Path) -> None:
    """Wake the SuperExec that waits at the pipe in this directory, if one does."""
    with suppress(OSError):
        pipe = os.open(directory / _PIPE, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b".")
        finally:
            os.close(pipe)


class WakeupPipe:
    """Where a SuperExec waits.

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
        """Sleep until `wake` is called, or has been since the last time; at most so long."""
        if select.select([self._pipe], [], [], seconds)[0]:
            os.read(self._pipe, 1 << 16)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])

"""A client's own clock: what takes it too long ends, and takes nobody's time but its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["TimeIsUp", "time_limit"]


class TimeIsUp(BaseException):
    """Raised where a client is when its time is over.

    No `Exception`: code that goes on after its own errors would otherwise go on after this too.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` in the code within once it has taken ``seconds``.

    Limits the main thread of a POSIX process, where Flower's runtimes run their clients; elsewhere
    nothing is limited. Python code, sleep and waits end; a call into C that never comes back does
    not. A timer that runs already (another's limit) is left alone.
    """
    try:
        before = signal.getsignal(signal.SIGALRM)
        if before not in (signal.SIG_DFL, None) or signal.getitimer(signal.ITIMER_REAL)[0]:
            raise ValueError("somebody else's timer runs")
        signal.signal(signal.SIGALRM, _raise)
    except (ValueError, AttributeError):  # not the main thread; no such signal
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp

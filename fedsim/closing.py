"""How things end: with their ``with``, when a signal asks, or with the process that forked them."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self


class Closed(ABC):
    """What `close` ends; ``with thing:`` calls it, however it is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End what was begun."""


_log = logging.getLogger("fedsim")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def end_on_signal(end: Callable[[], None]) -> Iterator[None]:
    """Call ``end`` at the first Ctrl-C or SIGTERM; the next one is a `KeyboardInterrupt`.

    Whoever handled these signals before is told of them, and so knows why the run ended; where
    SIGTERM would have ended the process, it does so once the context is left.
    """
    asked = False
    terminated = False
    before: dict[int, object] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked, terminated
        handler = before[number]
        if asked:
            raise KeyboardInterrupt
        asked = True
        if callable(handler):
            with suppress(KeyboardInterrupt):
                handler(number, frame)
        elif handler is signal.SIG_IGN:
            asked = False
            return
        else:
            terminated = number == signal.SIGTERM
        end()
        _log.warning("ending after this round; ask again to end at once.")

    for number in _SIGNALS:
        before[number] = signal.getsignal(number)
    try:
        for number in _SIGNALS:
            signal.signal(number, handle)
    except ValueError:  # not the main thread: whoever has that one decides
        yield
        return
    try:
        yield
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])  # type: ignore[arg-type]
        if terminated:
            signal.raise_signal(signal.SIGTERM)


_PDEATHSIG = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process, which ``parent`` has just forked, when that ends.

    However it ends: SIGKILL and the out-of-memory killer leave no time for anything else. On Linux
    only; elsewhere the parent has to end what it has forked. The process's own children do not
    count: a tree of processes, which needs time to end, is `fedsim.deploy.processes`'s to end.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the kernel was told.
    if os.getppid() != parent:
        os._exit(1)

"""Being asked to end: Ctrl-C, and SIGTERM as schedulers send it, let the round be finished."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["asked_to_end"]

_log = logging.getLogger("fedsim")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def asked_to_end(end: Callable[[], None]) -> Iterator[None]:
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

"""This process: closing what it opened, ending on signals and with its parent, cores, memory."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from fedsim.errors import FedsimError


class Closed(ABC):
    """Base of what must be closed: ``with thing:`` calls `close` at the end, even on errors."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Release threads, processes and files."""


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, raised like Ctrl-C; unlike that, it reaches this process alone, not its children."""


def ending(code: int) -> str:
    """How a process ended, by its exit code, which is negative after a signal.

    Examples
    --------
    >>> ending(1), ending(-9)
    ('exited with status 1', 'was ended by signal 9')
    """
    return f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"


GONE_SECONDS = 10.0


@contextmanager
def thread_pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads have ended, for the operating system too, when the context is left.

    Python's join returns before the system has ended the thread. MKL then still frees the thread's
    buffers, holding process-wide locks: a process that is forked at that moment inherits the held
    locks, and waits for ever in its first matrix product.
    """
    tasks: list[Path] = []

    def note() -> None:
        tasks.append(Path(f"/proc/self/task/{threading.get_native_id()}"))

    try:
        with ThreadPoolExecutor(count, initializer=note) as pool:
            yield pool
    finally:
        # At most so long: another thread may have got the id of one that has ended.
        latest = time.monotonic() + GONE_SECONDS
        while any(task.exists() for task in tasks) and time.monotonic() < latest:
            time.sleep(1e-4)


_log = logging.getLogger("fedsim")


def _handlers() -> dict[int, Any]:
    """Handlers of Ctrl-C and SIGTERM, without those from C, which Python cannot install again."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {number: handler for number, handler in handlers.items() if handler is not None}


@contextmanager
def _signals_handled(
    before: dict[int, Any], handle: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle the signals of ``before`` by ``handle``, and then by their own handlers again.

    Only the main thread can install handlers; in any other this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def end_on_signal(end: Callable[[], None]) -> Iterator[None]:
    """Call ``end`` at the first Ctrl-C or SIGTERM; the second raises `KeyboardInterrupt`.

    The handlers that were installed before are called too, so that they know why the run ended. If
    SIGTERM had its default action, it ends the process once the context is left. A signal whose
    handler was installed from C is left to that handler: Python could neither call nor restore it.
    """
    ending = False
    terminated = False
    before = _handlers()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal ending, terminated
        handler = before[number]
        if ending:
            raise KeyboardInterrupt
        ending = True
        if callable(handler):
            with suppress(KeyboardInterrupt):  # Python's handler of Ctrl-C: the round must finish
                handler(number, frame)
        elif handler is signal.SIG_IGN:
            ending = False
            return
        else:
            terminated = number == signal.SIGTERM
        end()
        _log.warning("ending after this round; interrupt again to end at once.")

    try:
        with _signals_handled(before, handle):
            yield
    finally:
        if terminated:
            signal.raise_signal(signal.SIGTERM)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Handle a first Ctrl-C or SIGTERM at the end of the context; a second one at once."""
    arrived: list[int] = []
    before = _handlers()

    def defer(number: int, _frame: FrameType | None) -> None:
        if arrived:
            raise KeyboardInterrupt
        arrived.append(number)

    try:
        with _signals_handled(before, defer):
            yield
    finally:
        for number in arrived:
            signal.raise_signal(number)


def usable_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_PDEATHSIG = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Make this process, just forked by ``parent``, end when its parent does.

    The kernel kills it, since a parent that ends by SIGKILL or the out-of-memory killer can do
    nothing more itself. Without a Linux kernel a thread checks five times a second whether the
    parent is alive. Every process that fedsim forks calls this. Programs that it starts are ended
    by `fedsim.deploy.processes`, since they have children of their own and need time to end.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        threading.Thread(target=_end_with, args=[parent], daemon=True).start()
        return
    prctl(_PDEATHSIG, signal.SIGKILL)
    # If the parent ended before the call above, no signal will come.
    if os.getppid() != parent:
        os._exit(1)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def refuse_larger_than_memory(size: int, what: str) -> None:
    """Refuse ``what`` if the ``size`` bytes that it needs exceed this machine's memory.

    Raises
    ------
    FedsimError
    """
    if size > memory():
        raise FedsimError(
            f"{what} needs {size / 2**30:,.1f} GiB; it must fit into the {memory() / 2**30:,.1f} "
            "GiB of this machine."
        )


_CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory() -> int:
    """Bytes of memory of this machine, or of this process's container if that has fewer."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CONTAINERS:
        try:
            sizes.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # no container, or one without a limit
    return min(sizes)

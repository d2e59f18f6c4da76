"""The one boundary of the command: every end of it has a status, and a sentence if it is a bad one.

=====  =================================================================
0      done
1      it ran and failed, the machine failed it, or a claim was refuted
2      the user's mistake
3      a sweep came to its end, but some of its members failed
130    Ctrl-C
143    SIGTERM
=====  =================================================================

An error of the user's own code (a loss, an algorithm, what makes a model) keeps its traceback; that
of a model that is tried on an example before a run is a sentence, which says where it is.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from fedsim.errors import FedsimError, RunFailedError, readable, users_place

Handler = Callable[[int, FrameType | None], object]

Listener = Callable[[int, str], object]
"""Takes the status with which the command ends, and the sentence of a bad end."""


def guarded(command: Callable[[], int]) -> int:
    """Run ``command``; its status, or that of the way in which it ended.

    Raises
    ------
    Exception
        Of the user's own code, or one that nobody has thought of.
    """
    terminated = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    def by_signal(status: int) -> int:
        return 143 if terminated and status == 130 else status

    _listeners.clear()
    before = _on_termination(terminate)
    try:
        try:
            status = by_signal(command())
            _tell_end(status, "")
            _finish_output()
        except (Exception, KeyboardInterrupt) as error:
            ending = _ending_by(error)
            if ending is None:
                _tell_end(1, f"{type(error).__name__}: {error}")
                raise
            status = by_signal(ending[0])
            _say(ending[1])
            _tell_end(status, ending[1])
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    if status:
        _flush_or_drop()
    return status


def tell_end_to(listener: Listener) -> None:
    """Let this be told of the end of the command that goes on, once and however it ends."""
    _listeners.append(listener)


_listeners: list[Listener] = []


def _tell_end(status: int, sentence: str) -> None:
    while _listeners:
        _listeners.pop(0)(status, sentence)


def _ending_by(error: BaseException) -> tuple[int, str] | None:
    """Status and sentence of an error that is no fault of fedsim's or of the user's code."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted."
    if isinstance(error, BrokenPipeError):
        return 1, "nobody reads the output any more."
    if isinstance(error, FedsimError):
        return 2, str(error)
    if isinstance(error, RunFailedError):
        return 1, f"the run failed: {error}"
    if isinstance(error, OSError | MemoryError | RuntimeError | ImportError):
        sentence = _of_the_machine(error)
        if sentence is not None and not users_place(error.__traceback__):
            # What a run's directory keeps.
            return 1, " ".join([sentence, *getattr(error, "__notes__", ())])
    return None


def _on_termination(handler: Handler) -> Handler | int | None:
    """End on SIGTERM as on Ctrl-C; the handler before, None outside the main thread."""
    try:
        return signal.signal(signal.SIGTERM, handler)
    except ValueError:
        return None


def _of_the_machine(error: OSError | MemoryError | RuntimeError | ImportError) -> str | None:
    """What the machine could not do, in a sentence; None for an error of another sort."""
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        return f"{error.filename}: {reason}." if error.filename else f"{reason}."
    if isinstance(error, ImportError):
        # The system's words where a library has no room, and no other fault.
        if re.search("map segment|allocate memory", str(error)) is None:
            return None
        return (
            f"a library could not be loaded ({error}): the memory, or the limit that `ulimit -v` "
            "sets, does not suffice; nothing has been begun."
        )
    # torch's allocators raise RuntimeError.
    if isinstance(error, MemoryError) or "memory" in str(error):
        detail = str(error).strip().splitlines()
        return f"the memory does not suffice ({detail[0] if detail else 'nothing more is known'})."
    return None


def _say(sentence: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # there may be nobody to tell
        print(f"fedsim: {readable(sentence)}", file=sys.stderr, flush=True)


def _finish_output() -> None:
    """Write what is still in the buffer.

    Raises
    ------
    OSError
        If that, or something printed before, has been lost.
    """
    from fedsim.cli.console import lost_output

    try:
        sys.stdout.flush()
    except OSError as error:
        lost: OSError | None = error
    else:
        lost = lost_output()
    if lost is not None:
        raise OSError(lost.errno, lost.strerror, "the output")


def _flush_or_drop() -> None:
    """Leave nothing in the buffer that could not be written when the interpreter ends."""
    from fedsim.cli.console import drop_output

    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        drop_output()


def open_standard_streams() -> None:
    """Take descriptors 0 to 2 where they were closed, so that no file of a run becomes one of them.

    What the output's encoding lacks is replaced, not an error.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lasts as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

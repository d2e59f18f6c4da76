"""The boundary of the command: maps every way it can end to a status, and errors to a sentence.

=====  =================================================================
0      done
1      it ran and failed, the machine failed it, or a claim was refuted
2      the user's mistake
3      a sweep ended, but some of its runs failed
130    Ctrl-C
143    SIGTERM
=====  =================================================================

An error in the user's own code (a loss, an algorithm, a function that makes a model) is shown with
a traceback of the user's frames alone. An error of a model when it is tried on an example before a
run is shown as a sentence with the line of code.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from fedsim.errors import (
    FedsimError,
    RunFailedError,
    keep_user_frames,
    readable,
    user_code_location,
)
from fedsim.optional_packages import missing_package_message
from fedsim.process import TerminatedError

Handler = Callable[[int, FrameType | None], object]

EndListener = Callable[[int, str], object]
"""Called with the command's exit status and, if it failed, the error's sentence."""

_listeners: list[EndListener] = []


def guarded(command: Callable[[], int]) -> int:
    """Run ``command``; return its status, or that of the exception or signal that ended it.

    Raises
    ------
    Exception
        If it is a defect of fedsim, so that its traceback is shown.
    """
    terminated = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        raise TerminatedError

    def by_signal(status: int) -> int:
        return 143 if terminated and status == 130 else status

    _listeners.clear()
    before = _on_termination(terminate)
    try:
        try:
            # Listeners may print (the last JSON line), so they come before the output is flushed;
            # output that was lost is then an error of its own.
            status = by_signal(command())
            _notify(status, "")
            _finish_output()
        except (Exception, KeyboardInterrupt) as error:
            ending = _expected_error(error)
            if ending is None:
                _notify(1, f"{type(error).__name__}: {error}")
                if not keep_user_frames(error):
                    raise
                traceback.print_exception(error)
                status = 1
            else:
                status, sentence = by_signal(ending[0]), ending[1]
                with suppress(OSError, ValueError, AttributeError):  # stderr may be gone
                    print(f"fedsim: {readable(sentence)}", file=sys.stderr, flush=True)
                _notify(status, sentence)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    if status:
        _flush_or_drop()
    return status


def notify_of_end(listener: EndListener) -> None:
    """Call ``listener`` once when the running command ends, for whatever reason."""
    _listeners.append(listener)


def _on_termination(handler: Handler) -> Handler | int | None:
    """Install a SIGTERM handler; return the previous one, or None outside the main thread."""
    try:
        return signal.signal(signal.SIGTERM, handler)
    except ValueError:
        return None


def _notify(status: int, sentence: str) -> None:
    while _listeners:
        _listeners.pop(0)(status, sentence)


def _expected_error(error: BaseException) -> tuple[int, str] | None:
    """Status and sentence of an expected error; None for a defect of fedsim or the user's code."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted."
    if isinstance(error, BrokenPipeError):
        return 1, "the output was closed by its reader."
    if isinstance(error, FedsimError):
        return 2, str(error)
    if isinstance(error, ImportError) and (sentence := missing_package_message(error)) is not None:
        return 2, sentence
    if isinstance(error, RunFailedError):
        return 1, f"the run failed: {error}"
    sentence = _machine_failure(error)
    if sentence is None or user_code_location(error.__traceback__):
        return None
    # The exception's notes describe what the run's directory contains.
    return 1, " ".join([sentence, *getattr(error, "__notes__", ())])


def _machine_failure(error: BaseException) -> str | None:
    """A sentence for an error of the machine (files, memory); None for other errors."""
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        return f"{error.filename}: {reason}." if error.filename else f"{reason}."
    # The dynamic linker's messages if memory is short, as opposed to other import errors.
    if isinstance(error, ImportError) and re.search("map segment|allocate memory", str(error)):
        return (
            f"a library could not be loaded ({error}): not enough memory, or too low a limit "
            "(`ulimit -v`); nothing was started."
        )
    # torch's allocators raise RuntimeError.
    short_of_memory = isinstance(error, RuntimeError) and "memory" in str(error)
    if isinstance(error, MemoryError) or short_of_memory:
        detail = str(error).strip().splitlines()
        return f"there is not enough memory ({detail[0] if detail else 'nothing more is known'})."
    return None


def _finish_output() -> None:
    """Flush the output.

    Raises
    ------
    OSError
        If that fails, or if earlier output was lost.
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
    """Empty the output buffer, which the interpreter would otherwise fail to flush at exit."""
    from fedsim.cli.console import drop_output

    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        drop_output()


def open_standard_streams() -> None:
    """Open descriptors 0 to 2 if they are closed, so that no file of a run gets one of them.

    Otherwise a print would write into that file. A character that the output's encoding lacks is
    replaced instead of raising an error.
    """
    # os.open returns the lowest free descriptor, so this fills the gaps among 0, 1 and 2.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lasts as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

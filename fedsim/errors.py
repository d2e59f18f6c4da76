"""The exceptions that users are meant to read."""

from __future__ import annotations

import functools
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, which need not be this interpreter's own (``pip --user``)."""


MAX_WORD, MAX_LINE = 300, 1200


def readable(text: object) -> str:
    """A message made safe for a terminal, whatever user's names and values it quotes.

    Control characters become "?", and very long words and lines are shortened in the middle.
    """
    lines = []
    for line in str(text).split("\n"):
        plain = "".join(sign if sign.isprintable() else "?" for sign in line)
        plain = re.sub(rf"(\S{{{MAX_WORD}}})\S+(\S)", r"\1...\2", plain)
        if len(plain) > MAX_LINE:
            plain = f"{plain[: MAX_LINE // 2]} ... {plain[-MAX_LINE // 3 :]}"
        lines.append(plain)
    return "\n".join(lines)


class FedsimError(ValueError):
    """A user's mistake, in one sentence: what was wrong and what is allowed.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, sentence: object = "") -> None:
        super().__init__(readable(sentence))


class BudgetSpentError(FedsimError):
    """A client's own privacy budget does not allow the release that it was asked for."""


class RunFailedError(RuntimeError):
    """A run failed after it had begun.

    Either every client failed in too many rounds in a row (in a run without privacy only), or
    Flower's runtime, on which the run was, failed.
    """


def printable(text: object, limit: int = 200) -> str:
    """Untrusted text made safe for one line of a log: short, without control characters."""
    start = str(text)[: limit + 1]
    plain = "".join(sign if sign.isprintable() else "?" for sign in start[:limit])
    return plain + "..." * (len(start) > limit)


def user_code_location(trace: TracebackType | None) -> str:
    """File and line of the innermost frame of the user's own code, such as ``nets.py:12``.

    Empty if every frame is fedsim's or a library's.
    """
    frames = _users_frames(trace)
    return f"{frames[-1].tb_frame.f_code.co_filename}:{frames[-1].tb_lineno}" if frames else ""


def described(error: BaseException) -> str:
    """An error of a user's code for one line of a log: its type, message, file and line."""
    place = user_code_location(error.__traceback__)
    return f"{type(error).__name__}: {error}" + (f" (at {place})" if place else "")


def user_traceback(function: F) -> F:
    """Cut the tracebacks of errors that leave a function down to the user's own frames.

    Frames of fedsim and of libraries (torch.fx, vmap) do not explain a user's mistake. Errors
    whose traceback has no frame of the user's keep it whole.
    """

    @functools.wraps(function)
    def shortened(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except Exception as error:
            keep_user_frames(error)
            # Not `raise error`: that would add this frame.
            raise

    return cast(F, shortened)


def keep_user_frames(error: BaseException | None) -> bool:
    """Cut the tracebacks of an error and of its causes; return whether any had a user's frame."""
    if error is None:
        return False
    frames = _users_frames(error.__traceback__)
    has_frames = keep_user_frames(error.__cause__ or error.__context__) or bool(frames)
    if has_frames:
        trace: TracebackType | None = None
        for entry in reversed(frames):
            trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        error.__traceback__ = trace
    return has_frames


def _users_frames(trace: TracebackType | None) -> list[TracebackType]:
    """Entries of a traceback whose code is neither fedsim's nor a library's."""
    package = Path(__file__).parent
    libraries = [Path(path) for path in set(sysconfig.get_paths().values())]
    places = [package, package.with_name("experiments"), *libraries]
    frames = []
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        is_library = (
            path.startswith("<")
            or not INSTALLED.isdisjoint(Path(path).parts)
            or any(Path(path).is_relative_to(place) for place in places)
        )
        if not is_library:
            frames.append(trace)
        trace = trace.tb_next
    return frames

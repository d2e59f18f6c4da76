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


LONGEST_WORD, LONGEST_LINE = 300, 1200


def readable(text: object) -> str:
    """A sentence as a terminal may have it, whatever names and values of a user's it quotes.

    Nothing in it moves a cursor, and what is very long is shortened in its middle.
    """
    lines = []
    for line in str(text).split("\n"):
        plain = "".join(sign if sign.isprintable() else "?" for sign in line)
        plain = re.sub(rf"(\S{{{LONGEST_WORD}}})\S+(\S)", r"\1...\2", plain)
        if len(plain) > LONGEST_LINE:
            plain = f"{plain[: LONGEST_LINE // 2]} ... {plain[-LONGEST_LINE // 3 :]}"
        lines.append(plain)
    return "\n".join(lines)


class FedsimError(ValueError):
    """A user's mistake, in one sentence: what was wrong and what is allowed.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, sentence: object = "") -> None:
        super().__init__(readable(sentence))


class BudgetSpentError(FedsimError):
    """A client's own budget does not allow what it was asked for."""


class RunFailedError(RuntimeError):
    """A run that had begun and failed, in a sentence.

    By too many rounds in a row, where nothing is private, in which every client failed; or with the
    runtime of Flower's that it was on.
    """


def printable(text: object, limit: int = 200) -> str:
    """A stranger's text as a line of a log may hold it: short, and nothing that moves a cursor."""
    start = str(text)[: limit + 1]
    plain = "".join(sign if sign.isprintable() else "?" for sign in start[:limit])
    return plain + "..." * (len(start) > limit)


def users_place(trace: TracebackType | None) -> str:
    """Where on the way to an error the user's own code was last, such as ``nets.py:12``.

    Empty where every frame is fedsim's or a library's.
    """
    frames = _users_frames(trace)
    return f"{frames[-1].tb_frame.f_code.co_filename}:{frames[-1].tb_lineno}" if frames else ""


def described(error: BaseException) -> str:
    """An error of a user's code as a line of a log has it: type, sentence, and the code's place."""
    place = users_place(error.__traceback__)
    return f"{type(error).__name__}: {error}" + (f" (at {place})" if place else "")


def users_traceback_alone(function: F) -> F:
    """Let errors of a user's code leave a function with the frames of that code alone.

    Frames of fedsim and of libraries (torch.fx, vmap) say nothing of a user's mistake. Errors on
    the way to which none of the user's code stood keep their traceback.
    """

    @functools.wraps(function)
    def shortened(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except Exception as error:
            keep_users_frames(error)
            # Not `raise error`: that would add this frame.
            raise

    return cast(F, shortened)


def keep_users_frames(error: BaseException | None) -> bool:
    """Shorten an error's traceback, and those of its causes; whether any was of the user's code."""
    if error is None:
        return False
    frames = _users_frames(error.__traceback__)
    found = keep_users_frames(error.__cause__ or error.__context__) or bool(frames)
    if found:
        trace: TracebackType | None = None
        for entry in reversed(frames):
            trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        error.__traceback__ = trace
    return found


def _users_frames(trace: TracebackType | None) -> list[TracebackType]:
    """The entries of a traceback that are neither fedsim's nor a library's."""
    package = Path(__file__).parent
    libraries = [Path(path) for path in set(sysconfig.get_paths().values())]
    places = [package, package.with_name("experiments"), *libraries]
    frames = []
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        known = (
            path.startswith("<")
            or not INSTALLED.isdisjoint(Path(path).parts)
            or any(Path(path).is_relative_to(place) for place in places)
        )
        if not known:
            frames.append(trace)
        trace = trace.tb_next
    return frames

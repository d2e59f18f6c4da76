"""The exceptions that users are meant to read."""

from __future__ import annotations

__all__ = ["FedsimError", "RunFailedError", "printable"]


class FedsimError(ValueError):
    """A user's mistake, in one sentence: what was wrong and what is allowed.

    The command line prints it without a traceback and exits with status 2.
    """


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

"""The exceptions that users are meant to read."""

from __future__ import annotations

__all__ = ["FedsimError", "RunFailedError"]


class FedsimError(ValueError):
    """A user's mistake, in one sentence: what was wrong and what is allowed.

    The command line prints it without a traceback and exits with status 2.
    """


class BudgetSpentError(FedsimError):
    """A client's own budget does not allow what it was asked for."""


class RunFailedError(RuntimeError):
    """Too many rounds in a row, of a run without privacy, in which every client failed."""

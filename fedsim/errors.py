"""The one exception that users are meant to read."""

from __future__ import annotations

__all__ = ["FedsimError"]


class FedsimError(ValueError):
    """A user's mistake, in one sentence: what was wrong and what is allowed.

    The command line prints it without a traceback and exits with status 2.
    """

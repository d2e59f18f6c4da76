"""How a round went, and when a run has failed."""

from __future__ import annotations

import logging
from dataclasses import dataclass

__all__ = ["Failures", "RoundReport", "RunFailedError"]

_log = logging.getLogger("fedsim")


class RunFailedError(RuntimeError):
    """Too many rounds in a row in which every client that was asked failed."""


@dataclass(frozen=True)
class RoundReport:
    """What happened in one round: the operator's knowledge, not covered by the guarantee."""

    round: int
    asked: int
    usable: int
    failed: int
    info: dict[str, float]


class Failures:
    """Counts rounds in which every client that was asked failed.

    Parameters
    ----------
    allowed : int
        So many of them in a row fail the run.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._in_a_row = 0

    def note(self, report: RoundReport, lost: bool) -> None:
        """Note how a round went.

        Raises
        ------
        RunFailedError
            If it was ``lost``, and too many before it.
        """
        if report.failed:
            _log.info("round %s: %s of %s failed.", report.round, report.failed, report.asked)
        self._in_a_row = self._in_a_row + 1 if lost else 0
        if self._in_a_row >= self._allowed:
            raise RunFailedError(
                f"every client that was asked failed in {self._in_a_row} rounds in a row, "
                f"the last of them round {report.round}."
            )

"""How a round went, and when a run has failed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Failures", "RoundReport", "RunFailedError"]

_log = logging.getLogger("fedsim")


class RunFailedError(RuntimeError):
    """Too many rounds in a row, of a run without privacy, in which every client failed."""


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
    allowed : int or None
        So many of them in a row fail the run. None in a private run, which never fails by
        them: that it went on must not tell what is in clients' data.
    """

    def __init__(self, allowed: int | None) -> None:
        self._allowed = allowed
        self._in_a_row = 0

    def state(self) -> dict[str, int]:
        """What outlives a round."""
        return {"in-a-row": self._in_a_row}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from what `state` gave."""
        self._in_a_row = state["in-a-row"]

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
        if not lost:
            return
        happened = (
            f"every client that was asked failed in {self._in_a_row} rounds in a row, "
            f"the last of them round {report.round}."
        )
        if self._allowed is not None and self._in_a_row >= self._allowed:
            raise RunFailedError(happened)
        _log.warning("%s", happened)

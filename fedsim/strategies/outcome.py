"""How a round went, and when a run has failed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoundReport", "RunFailedError"]


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

"""What a run reached, for who called it."""

from __future__ import annotations

from dataclasses import dataclass, field

from flwr.app import ArrayRecord

from fedsim.privacy import Statement
from fedsim.runs.artefacts import Ended, Row, RunDirectory

__all__ = ["RunResult"]


@dataclass(frozen=True)
class RunResult:
    """What a run reached.

    Attributes
    ----------
    metrics : list of mappings
        One a round, round 0 being the initial model: the rows of metrics.csv.
    arrays : ArrayRecord
        The parameters.
    privacy : Statement
        Epsilon, delta, adjacency, level, and what they cover: at client level, unless the run
        is private at example level only.
    example_privacy : Statement or None
        The same at example level, where clients protect their examples.
    ended : "finished", "budget", "stopped" or "interrupted"
        "stopped" is by a callback.
    why : str
        One sentence, where the run ended early.
    directory : RunDirectory or None
        Where the artefacts are.
    """

    metrics: list[Row]
    arrays: ArrayRecord
    privacy: Statement
    example_privacy: Statement | None = None
    ended: Ended = "finished"
    why: str = ""
    directory: RunDirectory | None = field(default=None, compare=False)

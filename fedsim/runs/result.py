"""What a run reached, for who called it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flwr.app import ArrayRecord

from fedsim.privacy import Statement
from fedsim.reports.markup import Markup, tag
from fedsim.reports.numbers import brief
from fedsim.reports.series import is_share
from fedsim.runs.artefacts import Ended, Row, RunDirectory

__all__ = ["RunResult"]


@dataclass(frozen=True, repr=False)
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
    notes : tuple of str
        Sentences about what was done to the model before it was trained.
    """

    metrics: list[Row]
    arrays: ArrayRecord
    privacy: Statement
    example_privacy: Statement | None = None
    ended: Ended = "finished"
    why: str = ""
    directory: RunDirectory | None = field(default=None, compare=False)
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        facts = self._facts()
        where = "in memory only" if self.directory is None else str(self.directory.path)
        reached = ", ".join(f"{name} {value}" for name, value in facts.items())
        ended = f"{self.ended} after round {self._rounds}" + f": {self.why}" * bool(self.why)
        return f"{ended}\n{reached or 'nothing was evaluated'}\n{where}"

    def _repr_html_(self) -> str:
        """A table for a notebook."""
        cells: dict[str, object] = {"ended": f"{self.ended} after round {self._rounds}"}
        cells |= {"why": self.why} if self.why else {}
        cells |= self._facts()
        if self.directory is not None:
            cells["directory"] = self.directory.path
        rows = (tag("tr", tag("th", name), tag("td", value)) for name, value in cells.items())
        table: Markup = tag("table", tag("tbody", *rows))
        return str(table)

    @property
    def _rounds(self) -> int:
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    def _facts(self) -> dict[str, str]:
        """The last of every metric on test examples, and what privacy was spent."""
        last: dict[str, float] = {}
        for row in self.metrics:
            last |= {name: value for name, value in row.items() if name.startswith("test-")}
        facts = {
            name.replace("-", " "): brief(value, is_share(name, [value]))
            for name, value in last.items()
        }
        for statement in (self.privacy, self.example_privacy):
            if statement is not None and statement.private and statement.cost.releases:
                level = f"{statement.words} at {statement.level} level"
                facts[level] = f"{brief(statement.epsilon)} (delta {statement.delta:g})"
        if not math.isfinite(self.privacy.epsilon):
            facts["privacy"] = "none"
        return facts

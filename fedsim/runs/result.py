"""What a run reached, for who called it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from flwr.app import ArrayRecord

from fedsim.config import RunConfig
from fedsim.config.plan import stopping, with_config_figures
from fedsim.lazy import function
from fedsim.privacy import ClientLedgers, Ledger, Statement, claimed
from fedsim.runs.directory import RunDirectory
from fedsim.runs.metrics import Row, brief, display_name, is_share
from fedsim.runs.record import Ended


class RanElsewhere(Exception):  # noqa: N818 - a run that succeeded is no error
    """A run has finished, and its artefacts are on the SuperLink's host, not on this one.

    Attributes
    ----------
    run_id : int
    path : str
        Where they are there.
    """

    def __init__(self, run_id: int, path: str) -> None:
        super().__init__(f"run {run_id} has finished; on the SuperLink's host, see {path}")
        self.run_id = run_id
        self.path = path


@dataclass(frozen=True, repr=False)
class RunResult:
    """What a run reached.

    Attributes
    ----------
    metrics : list of mappings
        One a round, round 0 being the initial model: the rows of metrics.csv.
    arrays : ArrayRecord
        The parameters.
    statements : function
        Gives `privacy` and `example_privacy`, from the ledgers. It takes a while after many rounds,
        and is called when one of them is looked at for the first time.
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
    statements: Callable[[], tuple[Statement, Statement | None]] = field(compare=False)
    ended: Ended = "finished"
    why: str = ""
    directory: RunDirectory | None = field(default=None, compare=False)
    notes: tuple[str, ...] = ()

    @property
    def privacy(self) -> Statement:
        """Epsilon, delta, adjacency, level, and what they cover.

        At client level, unless the run is private at example level only.
        """
        return self._statements[0]

    @property
    def example_privacy(self) -> Statement | None:
        """The same at example level, where clients protect their examples."""
        return self._statements[1]

    @cached_property
    def _statements(self) -> tuple[Statement, Statement | None]:
        return self.statements()

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
        table: str = function("fedsim.reports.page:facts_table")(cells)
        return table

    @property
    def _rounds(self) -> int:
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    def _facts(self) -> dict[str, str]:
        """The last of every metric on test examples, and what privacy was spent."""
        last: dict[str, float] = {}
        for row in self.metrics:
            last |= {name: value for name, value in row.items() if name.startswith("test-")}
        facts = {
            display_name(name): brief(value, is_share(name, [value]))
            for name, value in last.items()
        }
        for statement in (self.privacy, self.example_privacy):
            if statement is not None and statement.private and statement.cost.releases:
                level = f"{statement.words} at {statement.level} level"
                facts[level] = f"{brief(statement.epsilon)} (delta {statement.delta:g})"
        if not math.isfinite(self.privacy.epsilon):
            facts["privacy"] = "none"
        return facts


def statements(
    config: RunConfig, ledger: Ledger, of_clients: ClientLedgers | None, ended: str
) -> tuple[Statement, Statement | None]:
    """What is claimed of the run, and at example level.

    Parameters
    ----------
    config : RunConfig
    ledger : Ledger
        The server's.
    of_clients : ClientLedgers or None
        Those of the clients, where anybody here has them.
    ended : str
        As in `RunResult`.
    """
    end = stopping(config.to_run_config(), ledger.rounds_made, ended)
    examples = None if of_clients is None else of_clients.statement(stopping=end)
    server = with_config_figures(config, ledger.statement(config.noise.delta, stopping=end))
    if examples is not None:
        of_run = claimed(server if config.private else None, examples)
        return of_run[0], of_run[-1]
    if config.client.private:
        note = (
            "Clients protect their own examples: what that has cost each of them is in a "
            "ledger where the client keeps it, and not here."
        )
        server = replace(server, note=f"{server.note} {note}".strip())
    return server, None

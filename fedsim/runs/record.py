"""What a run has reached: for who called it, and read back from its files.

Files of another version's run are read as far as they can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from fedsim.config import Scalar
from fedsim.config.run_config import read_config
from fedsim.config.values import objects_in
from fedsim.errors import FedsimError
from fedsim.privacy import Entry, Statement
from fedsim.runs.directory import Ended, RunDirectory
from fedsim.runs.metrics import Row, brief, brief_metric, display_name
from fedsim.runs.run_ledgers import RunLedgers, read_summary
from fedsim.runs.run_lock import is_marked

if TYPE_CHECKING:
    from flwr.app import ArrayRecord


@dataclass(frozen=True)
class RunRecord:
    """A run as its files tell it.

    Attributes
    ----------
    path : Path
        Its directory.
    config : mapping of dotted key to value
        As it stands in config.toml, whether or not this version knows every key.
    rows : sequence of mapping
        Of metrics.csv: numbers by column, what a round lacks left out.
    statements : list of Statement
        Of every level at which there is a ledger.
    summary : mapping
        Of summary.json; empty for a run that did not end in good order.
    released : Entry or None
        The last round's line in the server's ledger.
    """

    path: Path
    config: Mapping[str, Scalar]
    rows: Sequence[Row]
    statements: list[Statement] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    released: Entry | None = None

    @classmethod
    def read(
        cls, path: Path, *, ledgers: bool = True, statements: list[Statement] | None = None
    ) -> RunRecord:
        """Read a run's directory, with its ``ledgers`` or without.

        Its ``statements`` are composed unless they are given, which takes a while.

        Raises
        ------
        FedsimError
            If it is none, or it or something in it is damaged or of a later format.
        """
        is_marked(path)
        directory = RunDirectory(path)
        if not directory.config.is_file():
            raise FedsimError(
                f"{path} is no run's directory: it has no config.toml; name one that "
                "`fedsim run` has written, such as runs/NAME."
            )
        config = read_config(directory.config)
        found = RunLedgers.read(path) if ledgers else RunLedgers(config)
        charged = [] if found.server is None else found.server.charged
        return cls(
            path=path,
            config=config,
            rows=directory.metrics_file.rows(),
            statements=found.statements() if statements is None else statements,
            summary=read_summary(directory.summary),
            released=next((entry for entry in reversed(charged) if entry.of_round), None),
        )

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.config.get("title") or self.config.get("name") or self.path.name)

    @property
    def objects(self) -> list[str]:
        """Names of the objects from Python that the run had; older runs' configs lack them."""
        of_summary: list[str] = self.summary.get("objects", [])
        return of_summary or objects_in(str(self.config.get("objects", "")))

    @property
    def rounds(self) -> int:
        """The last one that was finished."""
        return int(self.rows[-1].get("round", 0)) if self.rows else 0

    @property
    def client_private(self) -> bool:
        """Whether a client-level guarantee covers what clients did."""
        return any(s.private and s.level == "client" for s in self.statements)

    @property
    def private(self) -> bool:
        """Whether a guarantee covers anything of it, or was meant to."""
        return any(statement.private for statement in self.statements) or self.meant_private

    @property
    def meant_private(self) -> bool:
        """Whether the config asks for privacy: also where a ledger is missing."""
        return any(
            self.config.get(f"{table}mechanism.name", "none") != "none"
            and self.config.get(f"{table}noise.multiplier") != 0
            for table in ("", "client.")
        )

    def last(self, column: str) -> float | None:
        """The last number in a column that is finite."""
        for row in reversed(self.rows):
            if math.isfinite(row.get(column, math.nan)):
                return row[column]
        return None

    def columns(self) -> list[str]:
        """Names of the columns that have a number."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def curve(self, column: str) -> tuple[list[float], list[float]]:
        """Rounds that have a number in a column, and these numbers; NaN among them."""
        places = [(float(row["round"]), row[column]) for row in self.rows if column in row]
        return [x for x, _ in places], [y for _, y in places]


def read_all(paths: Sequence[Path]) -> list[RunRecord]:
    """Runs in these directories, and the members of sweeps; a run that is named twice once.

    Raises
    ------
    FedsimError
        If a directory holds neither.
    """
    runs: dict[Path, Path] = {}
    for path in paths:
        members = [path]
        if not (path / "config.toml").is_file():
            members = sorted(config.parent for config in path.glob("*/config.toml"))
        if not members:
            raise FedsimError(f"{path} holds no run and no sweep; name directories of runs.")
        runs |= {member.resolve(): member for member in members}
    return [RunRecord.read(run, ledgers=False) for run in dict.fromkeys(runs.values())]


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
    claims : function
        Gives `statements`, from the ledgers. It takes a while after many rounds, and is called when
        one of them is looked at for the first time.
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
    claims: Callable[[], list[Statement]] = field(compare=False)
    ended: Ended = "finished"
    why: str = ""
    directory: RunDirectory | None = field(default=None, compare=False)
    notes: tuple[str, ...] = ()

    @cached_property
    def statements(self) -> list[Statement]:
        """What is claimed of it, as `RunLedgers.statements` says."""
        return self.claims()

    @property
    def privacy(self) -> Statement:
        """Epsilon, delta, adjacency, level, and what they cover.

        At client level, unless the run is private at example level only.
        """
        return self.statements[0]

    @property
    def example_privacy(self) -> Statement | None:
        """The same at example level, where clients protect their examples."""
        return next((s for s in self.statements if s.level == "example"), None)

    def __repr__(self) -> str:
        facts = self._facts()
        where = "in memory only" if self.directory is None else str(self.directory.path)
        reached = ", ".join(f"{name} {value}" for name, value in facts.items())
        ended = f"{self.ended} after round {self.rounds}" + f": {self.why}" * bool(self.why)
        return f"{ended}\n{reached or 'nothing was evaluated'}\n{where}"

    def _repr_html_(self) -> str:
        """A table for a notebook."""
        cells: dict[str, object] = {"ended": f"{self.ended} after round {self.rounds}"}
        cells |= {"why": self.why} if self.why else {}
        cells |= self._facts()
        if self.directory is not None:
            cells["directory"] = self.directory.path
        table: str = resolve_name("fedsim.reports.page:render")("facts.html", facts=cells)
        return table

    @property
    def rounds(self) -> int:
        """The last one that was finished."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    def _facts(self) -> dict[str, str]:
        """The last of every metric on test examples, and what privacy was spent."""
        last: dict[str, float] = {}
        for row in self.metrics:
            last |= {name: value for name, value in row.items() if name.startswith("test-")}
        facts = {display_name(name): brief_metric(name, value) for name, value in last.items()}
        for statement in self.statements:
            if statement.private and statement.cost.releases:
                level = f"{statement.words} at {statement.level} level"
                facts[level] = f"{brief(statement.epsilon)} (delta {statement.delta:g})"
        if not math.isfinite(self.privacy.epsilon):
            facts["privacy"] = "none"
        return facts

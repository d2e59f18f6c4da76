"""Results of a run: as `fedsim.run` returns them, and as read from the run's files.

Files written by another version are read as far as possible.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from fedsim.config import Scalar
from fedsim.config.run_config import read_config
from fedsim.config.values import objects_in
from fedsim.errors import FedsimError
from fedsim.privacy import Entry, Statement
from fedsim.runs.directory import RunDirectory
from fedsim.runs.metrics import Row, display_name, format_metric, recent_mean
from fedsim.runs.run_ledgers import OutcomeKind, RunLedgers, RunOutcome, read_summary
from fedsim.runs.run_lock import is_marked

if TYPE_CHECKING:
    from flwr.app import ArrayRecord


@dataclass(frozen=True)
class RunRecord:
    """A run as read from its files.

    Attributes
    ----------
    path : Path
        The run's directory.
    config : mapping of dotted key to value
        Content of config.toml, with keys that this version may not know.
    rows : sequence of mapping
        Rows of metrics.csv: numbers by column, without columns that are empty in the row.
    ledgers : RunLedgers
    summary : mapping
        Content of summary.json; empty for a run that has not ended properly.
    """

    path: Path
    config: Mapping[str, Scalar]
    rows: Sequence[Row]
    ledgers: RunLedgers = field(default_factory=RunLedgers)
    summary: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, ledgers: RunLedgers | None = None) -> RunRecord:
        """Read a run's directory, and its ledgers unless they are passed as ``ledgers``.

        Composing their statements takes a while: pass ledgers that have done so, or empty ones if
        no statement is needed.

        Raises
        ------
        FedsimError
            If it is not a run's directory, or a file is damaged or of a later format.
        """
        is_marked(path)
        directory = RunDirectory(path)
        if not directory.config.is_file():
            raise FedsimError(
                f"{path} is not a run's directory: it has no config.toml; name one that `fedsim "
                "run` has written, such as runs/NAME."
            )
        config = read_config(directory.config)
        return cls(
            path=path,
            config=config,
            rows=directory.metrics_file.rows(),
            ledgers=RunLedgers.read(path) if ledgers is None else ledgers,
            summary=read_summary(directory.summary),
        )

    @property
    def statements(self) -> list[Statement]:
        """Privacy statements, one for each level that has a ledger; none without a ledger."""
        return self.ledgers.statements

    @property
    def outcome(self) -> RunOutcome:
        """How the run ended."""
        return self.ledgers.outcome

    @property
    def released(self) -> Entry | None:
        """The last round's line in the server's ledger; None if there is none."""
        entries = () if self.ledgers.server is None else self.ledgers.server.entries
        return next((entry for entry in reversed(entries) if entry.kind == "release"), None)

    @property
    def name(self) -> str:
        """The run's title, else its name, else its directory's name."""
        return str(self.config.get("title") or self.config.get("name") or self.path.name)

    @property
    def table_columns(self) -> dict[str, str]:
        """What columns are called in the run's table, by their names in fedsim (``owner``)."""
        pairs = (pair.split("=") for pair in str(self.config.get("data.columns", "")).split(","))
        return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}

    @property
    def client_noun(self) -> str:
        """What a client is, by the name of the owners' column; empty if clients are no owners."""
        if self.config.get("partition.name") != "by-owner":
            return ""
        column = str(self.config.get("partition.column", "owner"))
        own_name = self.table_columns.get(column, column)
        noun = re.sub("[_ -]*id$", "", own_name, flags=re.IGNORECASE)
        return "" if noun == "owner" else re.sub("[_-]+", " ", noun)

    @property
    def objects(self) -> list[str]:
        """Names of the Python objects that the run used (``model=``, ``data=``, ...)."""
        # An earlier version noted them in the summary alone.
        noted: list[str] = self.summary.get("objects", [])
        return noted or objects_in(str(self.config.get("objects", "")))

    @property
    def rounds(self) -> int:
        """Number of the last finished round."""
        return int(self.rows[-1].get("round", 0)) if self.rows else 0

    @property
    def client_private(self) -> bool:
        """Whether a client-level guarantee covers the run."""
        return any(s.private and s.level == "client" for s in self.statements)

    @property
    def private(self) -> bool:
        """Whether the run has a guarantee at any level, or its config asks for one."""
        return any(statement.private for statement in self.statements) or self.asks_for_privacy

    @property
    def asks_for_privacy(self) -> bool:
        """Whether the config asks for privacy, even if a ledger is missing."""
        return any(
            self.config.get(f"{table}mechanism.name", "none") != "none"
            and self.config.get(f"{table}noise.multiplier") != 0
            for table in ("", "client.")
        )

    def last(self, column: str) -> float | None:
        """The last number in a column, which may not be finite; None if there is none."""
        return next((row[column] for row in reversed(self.rows) if column in row), None)

    def recent(self, column: str) -> float | None:
        """The mean of a column's last five evaluations; None without any."""
        return recent_mean(self.rows, column)

    def columns(self) -> list[str]:
        """Names of the columns that have any number."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def curve(self, column: str) -> tuple[list[float], list[float]]:
        """Rounds with a number in a column, and these numbers, which may be NaN."""
        places = [(float(row["round"]), row[column]) for row in self.rows if column in row]
        return [x for x, _ in places], [y for _, y in places]


def read_all(paths: Sequence[Path]) -> list[RunRecord]:
    """Read the runs in these directories, and all runs of sweeps among them; each run once.

    Raises
    ------
    FedsimError
        If a directory has neither a run nor a sweep.
    """
    runs: dict[Path, Path] = {}
    for path in paths:
        members = [path]
        if not (path / "config.toml").is_file():
            members = sorted(config.parent for config in path.glob("*/config.toml"))
        if not members:
            raise FedsimError(
                f"{path} contains neither a run nor a sweep; name directories of runs."
            )
        runs |= {member.resolve(): member for member in members}
    return [
        RunRecord.read(run, RunLedgers(outcome=RunOutcome.read(run)))
        for run in dict.fromkeys(runs.values())
    ]


class ArtefactsElsewhere(Exception):  # noqa: N818 - a run that succeeded is no error
    """Raised when a run has succeeded, and its artefacts are on the SuperLink's host alone.

    Attributes
    ----------
    run_id : int
    path : str
        Path of the artefacts on that host.
    """

    def __init__(self, run_id: int, path: str) -> None:
        super().__init__(f"run {run_id} has finished; on the SuperLink's host, see {path}")
        self.run_id = run_id
        self.path = path


@dataclass(frozen=True, repr=False)
class RunResult:
    """Result of a run.

    Attributes
    ----------
    metrics : list of mappings
        Rows of metrics.csv, one for each round; round 0 is the initial model.
    arrays : ArrayRecord
        The final shared parameters.
    ledgers : RunLedgers
        What the run cost, and how it ended.
    directory : RunDirectory or None
        The run's directory; None if nothing was written.
    notes : tuple of str
        Sentences about changes made to the model before training.
    """

    metrics: list[Row]
    arrays: ArrayRecord
    ledgers: RunLedgers = field(compare=False)
    directory: RunDirectory | None = field(default=None, compare=False)
    notes: tuple[str, ...] = ()

    @property
    def ended(self) -> OutcomeKind:
        """How the run ended: "finished", "budget", "stopped" (by a callback) or "interrupted"."""
        return self.ledgers.outcome.ended

    @property
    def why(self) -> str:
        """One sentence if the run ended early; else empty."""
        return self.ledgers.outcome.why

    @property
    def statements(self) -> list[Statement]:
        """Privacy statements, the main one first; composing them takes a while at first use."""
        return self.ledgers.statements

    @property
    def privacy(self) -> Statement:
        """Main privacy statement: epsilon, delta, adjacency, level, and what they cover.

        At client level, unless the run is private at example level only.
        """
        return self.statements[0]

    @property
    def example_privacy(self) -> Statement | None:
        """Privacy statement at example level; None if clients do not protect their examples."""
        return next((s for s in self.statements if s.level == "example"), None)

    @property
    def guarantee(self) -> list[str]:
        """Five short lines, one sentence each: what is guaranteed, and what explains it.

        For epsilon and delta, whom they protect, what an attack misses, and who is trusted; the
        first four for each level that is protected. `privacy` is the whole statement.
        """
        config = self.ledgers.config
        if all(config.get(f"{t}mechanism.name", "none") == "none" for t in ("", "client.")):
            return [_NO_CLAIM]
        lines = [line for statement in self.statements for line in statement.summary()]
        if self.directory is None:
            return [*lines, "`print(result.privacy)` explains this."]
        return [*lines, f"`fedsim privacy {shlex.quote(str(self.directory.path))}` explains this."]

    def __repr__(self) -> str:
        facts = self._facts()
        location = "in memory only" if self.directory is None else str(self.directory.path)
        figures = ", ".join(f"{name} {value}" for name, value in facts.items())
        end = f"{self.ended} after round {self.rounds}" + f": {self.why}" * bool(self.why)
        return "\n".join([end, figures or "nothing was evaluated", *self.guarantee, location])

    def _repr_html_(self) -> str:
        """A table for a notebook."""
        cells: dict[str, object] = {"ended": f"{self.ended} after round {self.rounds}"}
        cells |= {"why": self.why} if self.why else {}
        cells |= self._facts() | {"privacy": self.guarantee}
        if self.directory is not None:
            cells["directory"] = self.directory.path
        table: str = resolve_name("fedsim.reports.page:render")("facts.html", facts=cells)
        return table

    @property
    def rounds(self) -> int:
        """Number of the last finished round."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    def _facts(self) -> dict[str, str]:
        """Last value of every metric on test examples."""
        last: dict[str, float] = {}
        for row in self.metrics:
            last |= {name: value for name, value in row.items() if name.startswith("test-")}
        return {display_name(name): format_metric(name, value) for name, value in last.items()}


_NO_CLAIM = (
    "No privacy is claimed: mechanism.name and client.mechanism.name are 'none', so updates are "
    "neither bounded nor noised."
)

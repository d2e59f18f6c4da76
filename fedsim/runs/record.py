"""What a run has reached: for who called it, and read back from its files.

Files of another version's run are read as far as they can be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Self

from fedsim import regular_files
from fedsim.config import Scalar
from fedsim.config.plan import stopping, with_config_figures
from fedsim.config.run_config import read_config
from fedsim.errors import FedsimError
from fedsim.privacy import ClientLedgers, Entry, Ledger, Statement, claimed
from fedsim.privacy.claims import FIXED, Stopping
from fedsim.runs.directory import Ended, RunDirectory, clients_ledgers, ending
from fedsim.runs.metrics import Row, brief, brief_metric, display_name
from fedsim.runs.run_lock import is_marked

if TYPE_CHECKING:
    from flwr.app import ArrayRecord

SUMMARY_FORMAT = 1


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
            summary=_read_summary(directory.summary),
            released=next((entry for entry in reversed(charged) if entry.of_round), None),
        )

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.config.get("title") or self.config.get("name") or self.path.name)

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


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(regular_files.read_text(path))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise FedsimError(f"{path} is damaged; it must be JSON that fedsim wrote.") from None
    written = summary.get("format") if isinstance(summary, dict) else None
    if written != SUMMARY_FORMAT:
        raise FedsimError(
            f"{path} has format {written}, and this fedsim reads {SUMMARY_FORMAT}; use the fedsim "
            "that wrote it."
        )
    return dict(summary)


def delta_of(config: Mapping[str, Scalar], level: str = "server") -> float:
    """The delta of a config by dotted keys: of the server's releases, or of a ``client``'s."""
    delta = config.get("client.noise.delta" if level == "client" else "noise.delta")
    return float(delta) if isinstance(delta, int | float) and 0 < delta < 1 else 1e-5


@dataclass(frozen=True)
class RunLedgers:
    """The ledgers of a run that are at hand.

    Attributes
    ----------
    config : mapping
        The run's config by dotted keys, of whatever version; empty where it is not known.
    server : Ledger or None
    clients : ClientLedgers or None
        Those of the clients, where anybody here has them.
    ended : str
        As in `RunResult`.
    """

    config: Mapping[str, Scalar] = field(default_factory=dict)
    server: Ledger | None = None
    clients: ClientLedgers | None = None
    ended: str = ""

    @classmethod
    def read(cls, run: Path, delta: float | None = None) -> Self:
        """Those of a run's directory; clients' at this delta, or the config's.

        Raises
        ------
        FedsimError
            If a file is damaged or of a later format.
        """
        directory = RunDirectory(run)
        config = read_config(directory.config) if directory.config.is_file() else {}
        server = Ledger.read(directory.ledger) if directory.ledger.is_file() else None
        own, clients = clients_ledgers(run, config), None
        if own is not None:
            delta = delta_of(config, "client") if delta is None else delta
            clients = ClientLedgers(own, delta=delta, read_only=True)
        return cls(config, server, clients, how_ended(directory))

    def charge_planned(self, *, server: bool = True) -> None:
        """Charge in the ledgers, which can be written, what releases have kept from being made."""
        end = self._stopping()
        if not end.left or self.server is None:
            return
        if server:
            self.server.charge_planned(end)
        if self.clients is not None:
            self.clients.charge_planned(replace(end, run=self._run))

    def _stopping(self) -> Stopping:
        if self.server is None:
            return FIXED
        return stopping(self.config, self.server.rounds_made, self.ended)

    @property
    def _run(self) -> str | None:
        """Which run it is in the clients' ledgers; None where its key is missing."""
        try:
            return None if self.server is None else self.server.run
        except (FedsimError, OSError):
            return None

    def statements(self, delta: float | None = None) -> list[Statement]:
        """What is claimed, at every level at which there is a ledger; the main one first.

        Parameters
        ----------
        delta : float, optional
            Of the server's statement; the config's if unset.
        """
        config, server = self.config, self.server
        end, examples = self._stopping(), None
        if self.clients is not None:
            examples = self.clients.statement(stopping=replace(end, run=self._run))
        if server is None:
            return claimed(None, examples)
        of_server = server.statement(delta_of(config) if delta is None else delta, stopping=end)
        of_server = with_config_figures(config, of_server, server.path)
        if examples is None and _clients_keep_ledgers(config):
            of_server = replace(of_server, note=f"{of_server.note} {_CLIENTS_KEEP_LEDGERS}".strip())
        # Without a bound of updates the server has released nothing that it claims anything of.
        bounded = config.get("mechanism.name", "none") != "none" or bool(server.charged)
        return claimed(of_server if bounded or examples is None else None, examples)


def charge_planned(run: Path, *, server: bool = True) -> None:
    """Charge what was planned in a run that does not go on, where what it has released ended it.

    One that declared that releases may end it did so, whatever else has. Without ``server``, in
    clients' ledgers alone, which other runs may share: the model names the server's last line.
    """
    directory = RunDirectory(run)
    config = read_config(directory.config) if directory.config.is_file() else {}
    ended = how_ended(directory)
    if not directory.ledger.is_file() or stopping(config, ended=ended) == FIXED:
        return
    place = clients_ledgers(run, config)
    clients = None if place is None else ClientLedgers(place, delta=delta_of(config, "client"))
    RunLedgers(config, Ledger(directory.ledger), clients, ended).charge_planned(server=server)


def how_ended(directory: RunDirectory) -> str:
    """How a run has ended, also one that a sweep has dropped after it had paused."""
    ended: str = ending(directory.path).ended
    if ended == "interrupted":
        ended = str(_read_summary(directory.summary).get("ended", ended))
    return ended


def _clients_keep_ledgers(config: Mapping[str, Scalar]) -> bool:
    """Whether clients protect their examples on nodes elsewhere, where their ledgers are."""
    bound = config.get("client.mechanism.name", "none")
    if config.get("client.mechanism.unsafe-non-private-raw-statistics"):
        return False
    return bound != "none" and bool(config.get("engine.federation"))


_CLIENTS_KEEP_LEDGERS = (
    "Clients protect their own examples: what that has cost each of them is in a ledger where the "
    "client keeps it, and not here."
)


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

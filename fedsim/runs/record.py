"""What a run has left, read back: also of another version's run, as far as it can be read."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from fedsim import regular_files
from fedsim.config import Scalar
from fedsim.config.plan import has_devices, stopping, with_config_figures
from fedsim.config.run_config import past_config
from fedsim.errors import FedsimError
from fedsim.privacy import ClientLedgers, Entry, Ledger, Statement, claimed
from fedsim.privacy.claims import FIXED
from fedsim.privacy.durable import archived
from fedsim.runs.metrics import MetricsFile, Row
from fedsim.runs.run_lock import is_marked

SUMMARY_FORMAT = 1

Ended = Literal["finished", "budget", "stopped", "interrupted", "dropped", "failed"]
"""How a run has ended; 'dropped' is by a sweep's halving."""


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
        The last line of the server's ledger.
    """

    path: Path
    config: Mapping[str, Scalar]
    rows: Sequence[Row]
    statements: list[Statement] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    released: Entry | None = None

    @classmethod
    def read(cls, path: Path, *, ledgers: bool = True) -> RunRecord:
        """Read a run's directory, with its ``ledgers`` or without.

        Raises
        ------
        FedsimError
            If it is none, or it or something in it is damaged or of a later format.
        """
        is_marked(path)
        if not (path / "config.toml").is_file():
            raise FedsimError(
                f"{path} is no run's directory: it has no config.toml; name one that "
                "`fedsim run` has written, such as runs/NAME."
            )
        config = read_config(path / "config.toml")
        statements, released = _ledgers(path, config) if ledgers else ([], None)
        return cls(
            path=path,
            config=config,
            rows=MetricsFile(path / "metrics.csv").rows(),
            statements=statements,
            summary=_read_summary(path / "summary.json"),
            released=released,
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


def clients_ledgers(run: Path, config: Mapping[str, Scalar]) -> Path | None:
    """Where a run's clients keep their ledgers, if that is on this machine."""
    kept = config.get("client.state-dir")
    pattern = "client-*.jsonl"
    for path in (*([Path(str(kept))] if kept else []), run / "clients"):
        if any(path.glob(pattern)) or archived(path / pattern):
            return path
    return None


def read_config(path: Path) -> dict[str, Scalar]:
    """A config by dotted keys as it stands in its file, of whatever version.

    Raises
    ------
    FedsimError
        If it is not TOML.
    """
    try:
        tree = tomllib.loads(regular_files.read_text(path))
    except ValueError as error:
        raise FedsimError(f"{path} is not valid TOML: {error}.") from None
    return dict(_flat(tree, ""))


def _flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


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


def ending(path: Path) -> tuple[Ended, str]:
    """How the run in a directory has ended, and a sentence if that was early."""
    try:
        written = json.loads(regular_files.read_text(path / "done"))
        return cast(Ended, str(written["ended"])), str(written["why"])
    except (OSError, ValueError, KeyError, TypeError):
        return "interrupted", "The run has not come to its end."


def last_release(run: Path) -> Entry | None:
    """The last line of the server's ledger; None without any."""
    ledger = Ledger.read(run / "ledger.jsonl") if (run / "ledger.jsonl").is_file() else None
    return ledger.charged[-1] if ledger is not None and ledger.charged else None


def _ledgers(path: Path, config: Mapping[str, Scalar]) -> tuple[list[Statement], Entry | None]:
    """What is claimed, and the last line of the server's ledger."""
    server, examples, end, released = None, None, FIXED, None
    if (path / "ledger.jsonl").is_file():
        delta = _number(config.get("noise.delta"))
        ledger = Ledger.read(path / "ledger.jsonl", delta=delta)
        released = ledger.charged[-1] if ledger.charged else None
        end = stopping(config, ledger.rounds_made, ending(path)[0])
        server = ledger.statement(delta, stopping=end)
        grouped = config.get("privacy.group", 1) != 1
        if grouped or config.get("noise.cohort-size") or has_devices(config):
            server = with_config_figures(past_config(path / "config.toml", dict(config)), server)
    if (kept := clients_ledgers(path, config)) is not None:
        delta = _number(config.get("client.noise.delta"))
        examples = ClientLedgers(kept, delta=delta, read_only=True).statement(stopping=end)
    return claimed(server, examples), released


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 1e-5

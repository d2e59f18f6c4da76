"""What a run cost and how it ended: its ledgers, its ending, and the statements that follow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from fedsim import regular_files
from fedsim.config import Scalar
from fedsim.config.devices import lateness
from fedsim.config.plan import with_assumptions
from fedsim.config.run_config import read_config
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger, Level, Statement, statements_to_show
from fedsim.privacy.assumptions import ReleaseSetting
from fedsim.privacy.ledger import LedgerPosition, statement_of
from fedsim.runs.metrics import QUANTILES, MetricsFile, Row, subject

SUMMARY_FORMAT = 1

OutcomeKind = Literal["finished", "budget", "stopped", "interrupted", "failed"]
"""How a run ended."""


class RunOutcome(NamedTuple):
    """How a run ended, and a sentence that says why if it ended early."""

    ended: OutcomeKind
    why: str = ""

    @classmethod
    def read(cls, run: Path) -> RunOutcome:
        """Read how the run in a directory ended; "interrupted" if it has not.

        Raises
        ------
        FedsimError
            See `read_summary`.
        """
        try:
            record = json.loads(regular_files.read_text(run / "done"))
            return cls(record["ended"], str(record["why"]))
        except (OSError, ValueError, KeyError, TypeError):
            summary = read_summary(run / "summary.json")
        # A run that failed can be resumed: no `done` yet.
        if summary.get("ended") == "failed":
            return cls("failed", str(summary.get("why", "")))
        return UNFINISHED


UNFINISHED = RunOutcome("interrupted", "The run has not finished.")


def ledger_paths(config: Mapping[str, Scalar], run: Path | None) -> dict[Level, Path]:
    """Paths of the ledgers of a run in a flat config: the server's, and that of clients' examples.

    Empty for a run without a directory that names no ledger.
    """
    named = str(config.get("privacy.ledger", ""))
    if not named and run is None:
        return {}
    server = Path(named) if named else (run or Path()) / "ledger.jsonl"
    return {"client": server, "example": server.with_name(f"{server.stem}-examples.jsonl")}


@dataclass(frozen=True)
class RunLedgers:
    """The ledgers of a run that are on this machine, and how it ended.

    Attributes
    ----------
    config : mapping
        The run's config by dotted keys, of any version; empty if it is not known.
    server : Ledger or None
    examples : sequence of Ledger
        The ledger of clients' examples; in a deployment on this machine, one for each node.
    ending : RunOutcome
    other_delta : float or None
        Delta of the statements, instead of the config's.
    path : path
        The run's directory.
    rows : sequence of mapping, optional
        Rows of metrics.csv; read from the directory if not given.
    client_splits : tuple of str, optional
        Those of "test" and "validation" whose examples are clients'; read from summary.json if not
        given.
    """

    config: Mapping[str, Scalar] = field(default_factory=dict)
    server: Ledger | None = None
    examples: Sequence[Ledger] = ()
    outcome: RunOutcome = UNFINISHED
    other_delta: float | None = None
    path: Path = Path()
    rows: Sequence[Row] | None = None
    client_splits: tuple[str, ...] | None = None

    @classmethod
    def read(
        cls,
        run: Path,
        *,
        delta: float | None = None,
        ends: Mapping[Level, LedgerPosition] | None = None,
    ) -> Self:
        """Read the ledgers of a run's directory.

        Parameters
        ----------
        run : path
        delta : float, optional
            Delta of the statements, instead of the config's.
        ends : mapping of level to LedgerPosition, optional
            Ends up to which they are read; other runs may have extended them since.

        Raises
        ------
        FedsimError
            If a file is damaged or of a later format.
        """
        config = read_config(run / "config.toml") if (run / "config.toml").is_file() else {}
        paths = ledger_paths(config, run)
        # A budget may have allowed this run no round.
        server = Ledger.read(paths["client"]) if paths["client"].is_file() else None
        own = [paths["example"]] if paths["example"].is_file() else node_ledgers(run, config)
        examples = [*map(Ledger.read, own)]
        for level, end in (ends or {}).items():
            for ledger in [server] if level == "client" else examples:
                if ledger is not None:
                    ledger.read_up_to(end)
        return cls(config, server, examples, RunOutcome.read(run), delta, run)

    @property
    def delta(self) -> float:
        """Delta of the server's statement."""
        return delta_of(self.config) if self.other_delta is None else self.other_delta

    @property
    def example_delta(self) -> float:
        """Delta of the examples' statement."""
        return example_delta_of(self.config) if self.other_delta is None else self.other_delta

    @cached_property
    def statements(self) -> list[Statement]:
        """Privacy statements, one for each level that has a ledger; the main one first."""
        facts = self._release_setting()
        return [replace(statement, run=facts) for statement in self._ledger_statements()]

    def _release_setting(self) -> ReleaseSetting | None:
        """What the config and the metrics say of the run; None without a config."""
        config = self.config
        if not config:
            return None
        network = config.get("engine.name") == "deployment"
        unprotected, private = (config.get(f"evaluate.{k}") for k in ("unprotected", "private"))
        if not (unprotected or private):
            return ReleaseSetting(network)
        rows = MetricsFile(self.path / "metrics.csv").rows() if self.rows is None else self.rows
        shown: dict[str, list[str]] = {}
        for column in dict.fromkeys(name for row in rows for name in row):
            whose = subject(column)
            shown.setdefault(whose, []).append(column.removeprefix(f"{whose}-"))
        if not unprotected:
            return ReleaseSetting(network, noisy=tuple(shown.get("clients", ())))
        client_splits = self.client_splits
        if client_splits is None:
            client_splits = read_client_splits(read_summary(self.path / "summary.json"))
        released = {"clients", "train", *client_splits}
        return ReleaseSetting(
            network,
            without_noise=tuple(
                f"{_metric_list(shown[split])} {of_whom}"
                for split, of_whom in _CLIENTS_DATA.items()
                if split in shown and split in released
            ),
        )

    def _ledger_statements(self) -> list[Statement]:
        config, server, examples = self.config, self.server, None
        used = [ledger for ledger in self.examples if ledger.entries]
        if used:
            place = f"{used[0].path.parent}/" if used[0].path and len(used) > 1 else None
            examples = statement_of(used, self.example_delta, place)
            examples = replace(examples, added_sentence=lateness(config))
        if server is None:
            return statements_to_show(None, examples)
        cut_short = self.outcome.ended in ("interrupted", "failed")
        of_server = server.statement(self.delta)
        cut_short &= server.last_round < int(config.get("rounds") or 0)
        of_server = with_assumptions(
            config, of_server, self.path / "config.toml", cut_short=cut_short
        )
        if examples is None and _nodes_keep_ledgers(config):
            of_server = replace(
                of_server,
                added_sentence=f"{of_server.added_sentence} {_NODES_KEEP_LEDGERS}".strip(),
            )
        # A server that does not bound updates claims nothing about its releases.
        bounded = config.get("mechanism.name", "none") != "none" or bool(server.entries)
        return statements_to_show(of_server if bounded or examples is None else None, examples)


def _metric_list(metrics: Sequence[str]) -> str:
    """Names of metrics, without those of their quantiles over clients."""
    quantiles = {f"{name}-{quantile}" for name in metrics for quantile in QUANTILES}
    means = ", ".join(name for name in metrics if name not in quantiles)
    return f"{means} (means and quantiles)" if quantiles & {*metrics} else means


# Subjects of metrics.csv's columns that may be of clients' data.
_CLIENTS_DATA = {
    "clients": "of clients' own evaluations",
    "train": "of clients' training",
    "test": "of clients' test examples",
    "validation": "of clients' validation examples",
}


def read_client_splits(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of "test" and "validation" whose examples are clients', or may be, by summary.json."""
    splits = ("test", "validation")
    return tuple(split for split in splits if summary.get(f"{split}-of-clients", True))


def node_ledgers(run: Path, config: Mapping[str, Scalar]) -> list[Path]:
    """Ledgers of the nodes of a run, by client, if they are on this machine."""
    state_dir = config.get("client.state-dir")
    for folder in (*([Path(str(state_dir))] if state_dir else []), run / "clients"):
        if paths := sorted(folder.glob("client-*.jsonl"), key=lambda p: (len(p.name), p.name)):
            return paths
    return []


def delta_of(config: Mapping[str, Scalar]) -> float:
    """Delta of the server's releases, in a flat config."""
    return _delta(config.get("noise.delta"))


def example_delta_of(config: Mapping[str, Scalar]) -> float:
    """Delta of the releases of clients that protect their examples, in a flat config."""
    return _delta(config.get("client.noise.delta"))


def _delta(value: Scalar | None) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 1 else 1e-5


def _nodes_keep_ledgers(config: Mapping[str, Scalar]) -> bool:
    """Whether clients protect their examples on remote nodes, which keep their ledgers."""
    bound = config.get("client.mechanism.name", "none")
    if config.get("client.mechanism.unsafe-non-private-raw-statistics"):
        return False
    return bound != "none" and bool(config.get("engine.federation"))


_NODES_KEEP_LEDGERS = (
    "Clients protect their own examples: the cost to each of them is in a ledger that the client "
    "keeps, not here."
)


def read_summary(path: Path) -> dict[str, Any]:
    """Read summary.json; empty if the run has not written it.

    Raises
    ------
    FedsimError
        If the file is damaged or of a later format.
    """
    try:
        summary = json.loads(regular_files.read_text(path))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise FedsimError(f"{path} is damaged; it must be JSON that fedsim wrote.") from None
    version = summary.get("format") if isinstance(summary, dict) else None
    if version != SUMMARY_FORMAT:
        raise FedsimError(
            f"{path} has format {version}, and this fedsim reads {SUMMARY_FORMAT}; use the fedsim "
            "that wrote it."
        )
    return dict(summary)

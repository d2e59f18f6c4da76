"""What a run cost and how it ended: its ledgers, its ending, and the statements that follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from fedsim import regular_files
from fedsim.config import Scalar
from fedsim.config.plan import stopping, with_config_figures
from fedsim.config.run_config import read_config
from fedsim.errors import FedsimError
from fedsim.privacy import ClientLedgers, Ledger, Statement, claimed
from fedsim.privacy.claims import FIXED, Stopping
from fedsim.privacy.client_ledgers import run_of
from fedsim.privacy.durable import archived

SUMMARY_FORMAT = 1

EndState = Literal["finished", "budget", "stopped", "interrupted", "failed"]
"""How a run ended."""


class Ending(NamedTuple):
    """How a run ended, and a sentence that says why if it ended early."""

    ended: EndState
    why: str = ""

    @classmethod
    def read(cls, run: Path) -> Ending:
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


UNFINISHED = Ending("interrupted", "The run has not finished.")


@dataclass(frozen=True)
class RunLedgers:
    """The ledgers of a run that are on this machine, and how it ended.

    Attributes
    ----------
    config : mapping
        The run's config by dotted keys, of any version; empty if it is not known.
    server : Ledger or None
    clients : ClientLedgers or None
        The clients' ledgers; None if they are not here.
    ending : Ending
    other_delta : float or None
        Delta of the server's statement, instead of the config's.
    """

    config: Mapping[str, Scalar] = field(default_factory=dict)
    server: Ledger | None = None
    clients: ClientLedgers | None = None
    ending: Ending = UNFINISHED
    other_delta: float | None = None

    @classmethod
    def read(cls, run: Path, *, delta: float | None = None, writable: bool = False) -> Self:
        """Read the ledgers of a run's directory.

        Parameters
        ----------
        run : path
        delta : float, optional
            Delta of the statements, instead of the config's.
        writable : bool
            Whether to open them for charges.

        Raises
        ------
        FedsimError
            If a file is damaged or of a later format.
        """
        config, ledger, server, clients = _config_in(run), run / "ledger.jsonl", None, None
        if ledger.is_file() or archived(ledger):  # a budget may have allowed this run no round
            server = Ledger(ledger) if writable else Ledger.read(ledger)
        if (directory := clients_ledgers(run, config)) is not None:
            clients_delta = example_delta_of(config) if delta is None else delta
            clients = ClientLedgers(directory, delta=clients_delta, read_only=not writable)
        return cls(config, server, clients, Ending.read(run), delta)

    @property
    def delta(self) -> float:
        """Delta of the server's statement."""
        return delta_of(self.config) if self.other_delta is None else self.other_delta

    @cached_property
    def stopping(self) -> Stopping:
        """The run's planned length, and whether its releases may have ended it earlier."""
        if self.server is None:
            return FIXED
        return stopping(self.config, self.server.rounds_made, self.ending.ended)

    def charge_planned(self, *, server: bool = True) -> None:
        """Charge the planned rounds that were not made because releases ended the run.

        The ledgers must be writable. If the number of rounds depends on what was released, the
        cost is that of the whole plan.
        """
        if not self.stopping.rounds_left or self.server is None:
            return
        if server:
            self.server.charge_planned(self.stopping)
        if self.clients is not None:
            self.clients.charge_planned(replace(self.stopping, run=run_of(self.server)))

    @cached_property
    def statements(self) -> list[Statement]:
        """Privacy statements, one for each level that has a ledger; the main one first."""
        config, server, examples = self.config, self.server, None
        if self.clients is not None:
            of_run = replace(self.stopping, run=run_of(server))
            examples = self.clients.statement(stopping=of_run)
        if server is None:
            return claimed(None, examples)
        of_server = server.statement(self.delta, stopping=self.stopping)
        of_server = with_config_figures(config, of_server, server.path)
        if examples is None and _clients_keep_ledgers(config):
            of_server = replace(of_server, note=f"{of_server.note} {_CLIENTS_KEEP_LEDGERS}".strip())
        # A server that does not bound updates claims nothing about its releases.
        bounded = config.get("mechanism.name", "none") != "none" or bool(server.charged)
        return claimed(of_server if bounded or examples is None else None, examples)


def charge_planned(run: Path, *, server: bool = True) -> None:
    """Charge the planned rounds of a run that is not continued, if its releases may have ended it.

    If the config declares that releases may end the run, they count as the cause whatever ended it.
    With ``server=False`` only the clients' ledgers are charged, which other runs may share; the
    server's must not change after the model was saved, whose metadata has its last line's hash.
    """
    # Most runs need no charge, and their ledgers are not read: a damaged one can be overwritten.
    if stopping(_config_in(run), end_state=Ending.read(run).ended) != FIXED:
        RunLedgers.read(run, writable=True).charge_planned(server=server)


def _config_in(run: Path) -> dict[str, Scalar]:
    path = run / "config.toml"
    return read_config(path) if path.is_file() else {}


def clients_ledgers(run: Path, config: Mapping[str, Scalar]) -> Path | None:
    """Directory of the ledgers of a run's clients; None if they are not on this machine."""
    state_dir = config.get("client.state-dir")
    pattern = "client-*.jsonl"
    for path in (*([Path(str(state_dir))] if state_dir else []), run / "clients"):
        if any(path.glob(pattern)) or archived(path / pattern):
            return path
    return None


def delta_of(config: Mapping[str, Scalar]) -> float:
    """Delta of the server's releases, in a flat config."""
    return _delta(config.get("noise.delta"))


def example_delta_of(config: Mapping[str, Scalar]) -> float:
    """Delta of the releases of clients that protect their examples, in a flat config."""
    return _delta(config.get("client.noise.delta"))


def _delta(value: Scalar | None) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 1 else 1e-5


def _clients_keep_ledgers(config: Mapping[str, Scalar]) -> bool:
    """Whether clients protect their examples on remote nodes, which keep their ledgers."""
    bound = config.get("client.mechanism.name", "none")
    if config.get("client.mechanism.unsafe-non-private-raw-statistics"):
        return False
    return bound != "none" and bool(config.get("engine.federation"))


_CLIENTS_KEEP_LEDGERS = (
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

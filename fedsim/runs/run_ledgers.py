"""Ledgers of a run's server and clients, and the privacy statements that follow from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from fedsim import regular_files
from fedsim.config import Scalar
from fedsim.config.plan import stopping, with_config_figures
from fedsim.config.run_config import read_config
from fedsim.errors import FedsimError
from fedsim.privacy import ClientLedgers, Ledger, Statement, claimed
from fedsim.privacy.claims import FIXED, Stopping
from fedsim.privacy.client_ledgers import run_of
from fedsim.runs.directory import RunDirectory, clients_ledgers, ending

SUMMARY_FORMAT = 1


def delta_of(config: Mapping[str, Scalar], level: str = "server") -> float:
    """Delta of a flat config: of the server's releases, or of the ``client``'s."""
    delta = config.get("client.noise.delta" if level == "client" else "noise.delta")
    return float(delta) if isinstance(delta, int | float) and 0 < delta < 1 else 1e-5


@dataclass(frozen=True)
class RunLedgers:
    """The ledgers of a run that are on this machine.

    Attributes
    ----------
    config : mapping
        The run's config by dotted keys, of any version; empty if it is not known.
    server : Ledger or None
    clients : ClientLedgers or None
        The clients' ledgers; None if they are not here.
    ended : str
        How the run ended, as in `RunResult`; "" if not known.
    """

    config: Mapping[str, Scalar] = field(default_factory=dict)
    server: Ledger | None = None
    clients: ClientLedgers | None = None
    ended: str = ""

    @classmethod
    def read(cls, run: Path, delta: float | None = None) -> Self:
        """Read the ledgers of a run's directory; ``delta`` is the clients', if not the config's.

        Raises
        ------
        FedsimError
            If a file is damaged or of a later format.
        """
        directory = RunDirectory(run)
        config = read_config(directory.config) if directory.config.is_file() else {}
        server = Ledger.read(directory.ledger) if directory.ledger.is_file() else None
        clients_directory, clients = clients_ledgers(run, config), None
        if clients_directory is not None:
            delta = delta_of(config, "client") if delta is None else delta
            clients = ClientLedgers(clients_directory, delta=delta, read_only=True)
        return cls(config, server, clients, end_state_of(directory))

    def charge_planned(self, *, server: bool = True) -> None:
        """Charge the planned rounds that were not made because releases ended the run.

        The ledgers must be writable. If the number of rounds depends on what was released, the
        cost is that of the whole plan.
        """
        end = self._stopping()
        if not end.rounds_left or self.server is None:
            return
        if server:
            self.server.charge_planned(end)
        if self.clients is not None:
            self.clients.charge_planned(replace(end, run=run_of(self.server)))

    def _stopping(self) -> Stopping:
        if self.server is None:
            return FIXED
        return stopping(self.config, self.server.rounds_made, self.ended)

    def statements(self, delta: float | None = None) -> list[Statement]:
        """Privacy statements, one for each level that has a ledger; the main one first.

        Parameters
        ----------
        delta : float, optional
            Delta of the server's statement; by default the config's.
        """
        config, server = self.config, self.server
        end, examples = self._stopping(), None
        if self.clients is not None:
            examples = self.clients.statement(stopping=replace(end, run=run_of(self.server)))
        if server is None:
            return claimed(None, examples)
        of_server = server.statement(delta_of(config) if delta is None else delta, stopping=end)
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
    directory = RunDirectory(run)
    config = read_config(directory.config) if directory.config.is_file() else {}
    end_state = end_state_of(directory)
    if not directory.ledger.is_file() or stopping(config, end_state=end_state) == FIXED:
        return
    place = clients_ledgers(run, config)
    clients = None if place is None else ClientLedgers(place, delta=delta_of(config, "client"))
    RunLedgers(config, Ledger(directory.ledger), clients, end_state).charge_planned(server=server)


def end_state_of(directory: RunDirectory) -> str:
    """How a run ended; also if a sweep dropped it after it had paused."""
    end_state: str = ending(directory.path).ended
    if end_state == "interrupted":
        end_state = str(read_summary(directory.summary).get("ended", end_state))
    return end_state


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

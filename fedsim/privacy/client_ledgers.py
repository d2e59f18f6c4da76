"""Ledgers of clients with example-level privacy: one for each client, and the worst of all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim.errors import FedsimError
from fedsim.privacy.claims import FIXED, Budget, Stopping, costliest
from fedsim.privacy.digest import Fingerprints
from fedsim.privacy.durable import archived
from fedsim.privacy.entry import Entry
from fedsim.privacy.ledger import Ledger
from fedsim.privacy.ledger_lines import End
from fedsim.privacy.records import to_json
from fedsim.privacy.statement import Statement


class ClientLedgers:
    """One ledger for each client, opened when it is first needed.

    Clients have disjoint data, so that the guarantee for all of them is that of the client that
    has spent most.

    Parameters
    ----------
    directory : path or None
        Directory of the ledgers, as ``client-7.jsonl``; None for ledgers in memory.
    delta : float
        Delta of every epsilon.
    max_epsilon : float or None
        Budget of each client.
    stopping : Stopping
        Whether releases may end the run, which determines the delta at which the budget holds.
    read_only : bool
        Whether other processes write the ledgers, and this one only reads them.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        delta: float,
        max_epsilon: float | None = None,
        stopping: Stopping = FIXED,
        read_only: bool = False,
    ) -> None:
        self.directory = directory
        self.delta = delta
        self._budget: Budget | None = None
        if max_epsilon is not None:
            budget_delta = stopping.planned_delta(delta)
            self._budget = Budget(max_epsilon, budget_delta, "client.noise.max-epsilon")
        self._read_only = read_only
        self._ledgers: dict[int, Ledger] = {}
        self._fingerprints = Fingerprints(directory, read_only=read_only)

    def of(self, client: int) -> Ledger:
        """The ledger of one client."""
        if client not in self._ledgers:
            path = None if self.directory is None else self.directory / f"client-{client}.jsonl"
            self._ledgers[client] = (
                Ledger.read(path, delta=self.delta)
                if self._read_only and path is not None
                else Ledger(path, delta=self.delta)
            )
        return self._ledgers[client]

    def fingerprint(self, parts: Iterable[bytes]) -> str:
        """A client's keyed fingerprint of everything that its release depends on."""
        return self._fingerprints.of(parts)

    def record(self, entry: Entry) -> None:
        """Write a line to a client's ledger, on disk before anything is computed.

        Raises
        ------
        BudgetSpentError
            If the client's budget does not allow it.
        FedsimError
            If this round of this run was recorded with other data or another incoming model, and
            the noise follows from the seed.
        """
        self.of(_client(entry)).record(entry, budget=self._budget)

    def exceeded(self, entries: Iterable[Entry]) -> str | None:
        """Message about the first entry that exceeds its client's budget; None if none does."""
        budget = self._budget
        if budget is None:
            return None
        for entry in entries:
            if self.of(_client(entry)).would_exceed(entry, budget=budget):
                return budget.message(entry)
        return None

    def with_releases(self) -> list[Ledger]:
        """Ledgers of all clients that have ever released anything, read up to date."""
        for client in self._clients_on_disk():
            self.of(client)
        for ledger in self._ledgers.values():
            ledger.refresh()
        return [
            self._ledgers[client]
            for client in sorted(self._ledgers)
            if self._ledgers[client].charged
        ]

    def state(self) -> dict[str, dict[str, Any]]:
        """Each ledger's part of a checkpoint, by client."""
        self.with_releases()  # reads what other processes have written
        return {
            str(client): to_json(self._ledgers[client].end)
            for client in sorted(self._ledgers)
            if self._ledgers[client].heads
        }

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that the ledgers extend those of a checkpoint; later lines stay charged.

        Raises
        ------
        FedsimError
            If lines of the checkpoint are missing from a ledger, or changed.
        """
        for client, state in states.items():
            self.of(int(client)).check_continues(End(**state))

    def epsilon(
        self,
        round: int | None = None,
        release: str | None = None,
        stopping: Stopping = FIXED,
    ) -> float:
        """Epsilon of the client that has spent most; with ``round``, as of `Ledger.as_of`."""
        histories = [
            ledger.history if round is None else ledger.as_of(round, release)
            for ledger in self.with_releases()
        ]
        if not histories:
            return 0.0
        stopping = replace(stopping, max_epsilon=None)  # the server's
        return stopping.epsilon(costliest(histories, self.delta, stopping), self.delta)

    def charge_planned(self, stopping: Stopping) -> None:
        """Call `Ledger.charge_planned` for each client that has released anything."""
        client_stopping = replace(stopping, max_epsilon=None, evaluation=None)  # the server's
        for ledger in self.with_releases():
            ledger.charge_planned(client_stopping)

    def worst(self) -> Ledger:
        """Ledger of the client that has spent most; at least one must have released something."""
        ledgers = self.with_releases()
        histories = [ledger.history for ledger in ledgers]
        return ledgers[histories.index(costliest(histories, self.delta))]

    def statement(self, *, stopping: Stopping = FIXED) -> Statement | None:
        """Privacy statement that holds for every client; None if none has released anything.

        ``stopping`` is as in `Statement.of`.
        """
        ledgers = self.with_releases()
        if not ledgers:
            return None
        count = len(ledgers)
        place = "kept in memory only" if self.directory is None else f"{self.directory}/"
        return Statement.of(
            ledgers,
            self.delta,
            f"{place}, one for each of {count} client{'s' * (count > 1)}",
            stopping=replace(stopping, max_epsilon=None),  # the server's
        )

    def _clients_on_disk(self) -> list[int]:
        """Ids of clients with a ledger on disk, archived ones included."""
        if self.directory is None:
            return []
        pattern = self.directory / "client-*.jsonl"
        paths = [*self.directory.glob(pattern.name), *archived(pattern)]
        names = (re.fullmatch(r"client-(\d+)\.jsonl", path.name, re.ASCII) for path in paths)
        return sorted({int(name[1]) for name in names if name})


def run_of(server: Ledger | None) -> str | None:
    """Id of a server's run in the clients' ledgers; None if the run's key is missing."""
    try:
        return None if server is None else server.run
    except (FedsimError, OSError):
        return None


def _client(entry: Entry) -> int:
    if entry.client is None:
        raise FedsimError("an entry of a client's ledger must name its client.")
    return entry.client

"""The ledgers of clients that protect their examples: one each, and what all of them say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsim.errors import BudgetSpentError
from fedsim.privacy.claims import FIXED, Spending, Stopping, costliest_ledger
from fedsim.privacy.durable import Fingerprints, archived
from fedsim.privacy.entry import Entropy, Fact
from fedsim.privacy.events import Event
from fedsim.privacy.ledger import Ledger
from fedsim.privacy.statement import Statement


@dataclass(frozen=True, kw_only=True)
class ClientRelease:
    """What a client is about to release in a round.

    Attributes
    ----------
    client : int
    event : Event
    entropy : "config" or "system"
    release : str
        Digest of the config, or a number used once.
    fingerprint : str
        Its own, of its data and of what it received.
    run : str or None
        Which run it is, by the key in the run's directory.
    mechanism : str
    public : mapping
        What it has declared: its number of examples, steps, a denominator.
    """

    client: int
    event: Event
    entropy: Entropy
    release: str
    fingerprint: str
    run: str | None = None
    mechanism: str = ""
    public: Mapping[str, Fact] = field(default_factory=dict)

    def names(self, round: int) -> dict[str, Any]:
        """By what a ledger knows it again."""
        return {
            "round": round,
            "level": "example",
            "entropy": self.entropy,
            "release": self.release,
            "client": self.client,
            "fingerprint": self.fingerprint,
            "run": self.run,
        }


class ClientLedgers:
    """One ledger for each client, opened when it is first needed.

    Clients hold disjoint data, so what holds for all of them is what holds for the one that
    has spent most.

    Parameters
    ----------
    directory : path or None
        Where they are, as ``client-7.jsonl``; None: in memory.
    delta : float
        At which epsilon is asked.
    max_epsilon : float or None
        What no client may spend more than.
    stopping : Stopping
        Whether what is released may end the run, and at which delta the budget holds.
    read_only : bool
        Whether they are other processes', to look at.
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
        self.max_epsilon = max_epsilon
        self._budget_delta = stopping.planned_delta(delta)
        self._read_only = read_only
        self._open: dict[int, Ledger] = {}
        self._fingerprints = Fingerprints(directory)

    def of(self, client: int) -> Ledger:
        """The ledger of one client."""
        if client not in self._open:
            path = None if self.directory is None else self.directory / f"client-{client}.jsonl"
            self._open[client] = (
                Ledger.read(path, delta=self.delta)
                if self._read_only and path is not None
                else Ledger(path, delta=self.delta, max_epsilon=self.max_epsilon)
            )
        return self._open[client]

    def fingerprint(self, parts: Iterable[bytes]) -> str:
        """A client's keyed fingerprint of what its release is a function of."""
        return self._fingerprints.of(parts)

    def record(self, round: int, release: ClientRelease) -> None:
        """One line in the client's ledger, on disk before anything is computed.

        Raises
        ------
        BudgetSpentError
            If the client's budget does not allow it.
        FedsimError
            If the client went through this round of this run with other data, or from another
            model, and its noise follows from the seed.
        """
        try:
            self.of(release.client).record(
                **release.names(round),
                event=release.event,
                mechanism=release.mechanism,
                placement="client",
                public=release.public,
                delta=self._budget_delta,
            )
        except BudgetSpentError:
            raise BudgetSpentError(f"{self._exceeds(round, release)}.") from None

    def exceeded(self, round: int, releases: Iterable[ClientRelease]) -> str | None:
        """Why one of these cannot be made within its client's budget; None if all can."""
        if self.max_epsilon is None:
            return None
        for release in releases:
            if self.of(release.client).would_exceed(
                release.event, delta=self._budget_delta, **release.names(round)
            ):
                return self._exceeds(round, release)
        return None

    def _exceeds(self, round: int, release: ClientRelease) -> str:
        return (
            f"round {round} would exceed client.noise.max-epsilon = {self.max_epsilon} of "
            f"client {release.client} at delta = {self._budget_delta}"
        )

    def everyone(self) -> list[Ledger]:
        """The ledgers of all clients that have ever released anything, as they are now."""
        for client in self._found():
            self.of(client)
        for ledger in self._open.values():
            ledger.refresh()
        return [self._open[client] for client in sorted(self._open) if self._open[client].charged]

    def state(self) -> dict[str, dict[str, Any]]:
        """Where each of them stands, by its client, for a checkpoint."""
        self.everyone()  # as they are on the disk now
        return {
            str(client): self._open[client].state()
            for client in sorted(self._open)
            if self._open[client].heads
        }

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Make sure that they go on from a checkpoint; what is beyond stays charged.

        Raises
        ------
        FedsimError
            If lines of one that the checkpoint knew are missing, or are others.
        """
        for client, state in states.items():
            self.of(int(client)).restore(state)

    def epsilon(
        self,
        round: int | None = None,
        release: str | None = None,
        stopping: Stopping = FIXED,
    ) -> float:
        """What the client that has spent most has spent; as of a round, see `Ledger.as_of`."""
        everyone = self.everyone()
        spent: list[Spending] = [*everyone]
        if round is not None:
            spent = [ledger.as_of(round, release) for ledger in everyone]
        if not spent:
            return 0.0
        stopping = replace(stopping, max_epsilon=None)  # the server's
        worst = costliest_ledger(spent, self.delta, stopping)
        return stopping.epsilon(worst.accountant(), worst.last_event, self.delta)

    def statement(self, *, stopping: Stopping = FIXED) -> Statement | None:
        """What holds for every client; None if none has released anything.

        ``stopping`` as of `Statement.of`.
        """
        everyone = self.everyone()
        if not everyone:
            return None
        many = len(everyone)
        place = "kept in memory only" if self.directory is None else f"{self.directory}/"
        return Statement.of(
            everyone,
            self.delta,
            f"{place}, one for each of {many} client{'s' * (many > 1)}",
            stopping=replace(stopping, max_epsilon=None),  # the server's
        )

    def _found(self) -> list[int]:
        """Clients that have a ledger on the disk."""
        if self.directory is None:
            return []
        paths = [
            *self.directory.glob("client-*.jsonl"),
            *archived(self.directory / "client-*.jsonl"),
        ]
        names = (re.fullmatch(r"client-(\d+)\.jsonl", path.name, re.ASCII) for path in paths)
        return sorted({int(name[1]) for name in names if name})

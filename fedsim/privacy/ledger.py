"""The ledger: every release is recorded on disk before it is made.

A ledger is an append-only file of JSON lines, chained by hashes: a header, then one line for each
event. Nothing else is needed to recompute epsilon. Earlier ledgers in ``archive/``, in the same
directory, count too.

A last line without a newline (torn) was being written when the machine stopped. `record` had not
returned, so that nothing was released. The line is charged all the same, at no less than any
event that the ledger knows of, until a run with the same draws records the same release again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Cost, check_delta
from fedsim.privacy.claims import FIXED, Budget, Stopping
from fedsim.privacy.digest import Fingerprints
from fedsim.privacy.durable import archived
from fedsim.privacy.entry import Entry, History, Placement
from fedsim.privacy.events import Event
from fedsim.privacy.flower_records import event_of, privacy_config, privacy_spent
from fedsim.privacy.laws import FixedSizeLaw
from fedsim.privacy.ledger_file import LedgerFile
from fedsim.privacy.ledger_lines import End
from fedsim.privacy.statement import Statement

if TYPE_CHECKING:
    from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent

    from fedsim.privacy.plan import Bounded, ReleasePlan


class Ledger(LedgerFile):
    """Record of all releases, written before each of them; gives epsilon at any time.

    It implements Flower's ``flwr.serverapp.PrivacyAccountant`` protocol, so that Flower's own DP
    strategies can use it too.

    Parameters
    ----------
    path : path or None
        File to continue or, at the first record, to create. None: in memory only.
    delta : float or None
        Default delta of every epsilon.
    max_epsilon : float or None
        Default budget of `record` and `would_exceed`.
    declared : Event or None
        Cost of one planned round. A torn line is charged at no less, and Flower's protocol
        takes sampling and population from it.
    read_only : bool
        Whether nothing is recorded, or repaired on disk.

    Raises
    ------
    FedsimError
        If the file is no ledger, or was changed after it was written, or archived ledgers do not
        compose with the declared event.
    """

    @check_arguments
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        delta: float | None = None,
        max_epsilon: float | None = None,
        declared: Event | None = None,
        read_only: bool = False,
    ) -> None:
        if delta is not None:
            check_delta(delta)
        if max_epsilon is not None and not max_epsilon > 0:
            raise FedsimError(f"max_epsilon is {max_epsilon}; it must be above 0.")
        self.delta = delta
        self.max_epsilon = max_epsilon
        self.declared = declared
        place = None if path is None else Path(path)
        super().__init__(place, planned=declared, read_only=read_only)
        keys = None if place is None else place.parent
        self._fingerprints = Fingerprints(keys, read_only=read_only)
        if declared is not None:  # refuse adjacencies that do not compose before any release
            self.history.after(Entry(event=declared))

    @classmethod
    @check_arguments
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        delta: float | None = None,
        declared: Event | None = None,
    ) -> Self:
        """Open an existing ledger read-only.

        Raises
        ------
        FedsimError
            If the file does not exist, is no ledger, or was changed after it was written.
        """
        if not Path(path).is_file() and not archived(Path(path)):
            raise FedsimError(f"there is no ledger at {path}.")
        return cls(path, delta=delta, declared=declared, read_only=True)

    @check_arguments
    def record(self, entry: Entry, *, budget: Budget | None = None) -> bool:
        """Record a release. When this returns, the line is on disk and the release may be made.

        Parameters
        ----------
        entry : Entry
        budget : Budget, optional
            Budget, instead of the ledger's own. The check of the budget and the writing of the
            line are under one lock.

        Returns
        -------
        bool
            False if the same release is in the ledger already, and so is not charged again:
            entropy "config" and the same run, release digest, round, attempt and event; and the
            same ``sum`` at client level, the same client and fingerprint at example level.
            Without ``sum`` the caller vouches that the release is the same.

        Raises
        ------
        BudgetSpentError
            If the budget does not allow it.
        FedsimError
            If the level or adjacency is not that of the ledger; if this round of this run was
            recorded with another sum or other data, and its noise follows from the seed; or if
            the file was changed by something other than a ledger.
        """
        if budget is None and self.max_epsilon not in (None, math.inf):
            budget = self._budget()
        return self.write(entry, budget)

    def _budget(self, max_epsilon: float | None = None) -> Budget:
        limit = self.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise FedsimError("max_epsilon was given neither to the ledger nor to would_exceed.")
        return Budget(limit, self._delta(None))

    @contextmanager
    def release(
        self, plan: ReleasePlan[Bounded], round: int, placement: Placement = "server"
    ) -> Iterator[Entry]:
        """Record a round of a training loop that is not fedsim's, before its release.

        Sampling and noise are declared by the user. A round that is repeated after an
        interruption is charged again::

            with ledger.release(plan, round):
                model += noisy_mean(updates)

        Parameters
        ----------
        plan : ReleasePlan
        round : int
            From 1 on.
        placement : "server" or "client"
            Where the noise is drawn: at the server, or in each client before it sends anything.

        Yields
        ------
        Entry
            The entry, whose line is on disk.

        Raises
        ------
        BudgetSpentError
            If the budget does not allow it.
        FedsimError
            As `record` does.
        """
        attempt = sum(entry.round == round for entry in self.history.of_this_run)
        entry = Entry(
            round=round,
            attempt=attempt,
            level=plan.level,
            event=plan.charge(round, attempt),
            mechanism=str(plan.bound),
            placement=placement,
            declared_by_user=True,
            public=plan.public,
        )
        self.record(entry)
        yield entry

    def fingerprint(self, parts: Iterable[bytes]) -> str:
        """HMAC of these parts, under the key next to the ledger."""
        return self._fingerprints.of(parts)

    @property
    def run(self) -> str:
        """Unique id of the run that writes the ledger; the same after a resume."""
        return self.fingerprint([b"run"])

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries of this ledger, torn lines included."""
        return tuple(self._entries)

    @property
    def charged(self) -> tuple[Entry, ...]:
        """Charged entries, the archive's first; without torn lines and planned rounds whose
        releases were recorded later."""
        return tuple(self.history.effective)

    @property
    def rounds_made(self) -> int:
        """Number of the last round in this ledger; 0 if there is none."""
        return max((entry.round or 0 for entry in self.history.of_this_run), default=0)

    def cost(self, delta: float | None = None) -> Cost:
        """Epsilon charged so far, with its accounting method and the figures to compare it with."""
        cost = self.history.accountant.cost(self._delta(delta))
        return replace(cost, releases=self.history.releases)

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon charged so far; takes milliseconds for any number of rounds."""
        return self.history.accountant.epsilon(self._delta(delta))

    def as_of(self, round: int, release: str | None) -> History:
        """History as of a round, for a resumed run that repeats rounds already in the ledger.

        Parameters
        ----------
        round : int
        release : str or None
            The run's release digest. Its later rounds are left out if they will be repeated with
            the same bytes. Rounds with system entropy, and all other entries, stay.
        """

        def is_repeated(entry: Entry) -> bool:
            is_later = entry.round is not None and entry.round > round
            return is_later and entry.release == release is not None and entry.entropy == "config"

        entries = self._entries
        if not entries or not is_repeated(entries[-1]):
            return self.history
        history, run = History(self.history.archived), entries[-1].run
        for entry in self.history.of_this_run:
            if entry.run != run or not is_repeated(entry):
                history.add_unchecked(entry)
        return history

    def would_exceed(
        self,
        event: Entry | Event | GaussianPrivacyEvent,
        max_epsilon: float | None = None,
        count: int = 1,
        *,
        budget: Budget | None = None,
    ) -> bool:
        """Whether a release would exceed a budget; nothing is recorded.

        Parameters
        ----------
        event : Entry, Event or GaussianPrivacyEvent
            An entry that `record` would not charge again costs nothing; its ``sum`` is ignored
            here (`record` refuses a different one).
        max_epsilon : float, optional
            Budget at the ledger's delta, instead of the ledger's own.
        count : int
            How often it is released.
        budget : Budget, optional
            Budget at a delta of its own; not together with ``max_epsilon``.
        """
        if budget is not None and max_epsilon is not None:
            raise FedsimError(f"max_epsilon is {max_epsilon} beside a budget; give one of the two.")
        budget = budget or self._budget(max_epsilon)
        self.refresh()
        if not isinstance(event, Entry):
            event = Entry(event=event_of(event, self.declared), level=self.level)
        planned = replace(event, event=event.event.times(count), sum=None)
        attempts = (replace(line, sum=None) for line in self.attempts(planned))
        if any(planned.repeats(line) for line in attempts):
            return self.epsilon(budget.delta) > budget.epsilon
        # The line's beginning, with round and event, identifies it; a planned entry may lack facts
        # that come later in the line.
        if self.has_fragment_of(planned, upto=',"mechanism":'):
            planned = replace(planned, settles=True)
        return self.history.after(planned).epsilon(budget.delta) > budget.epsilon

    def charge_planned(self, stopping: Stopping) -> None:
        """Charge planned rounds that are not made, since releases have ended the run.

        Calling it again charges nothing more. A resumed run makes these rounds without further
        cost.
        """
        for entry in stopping.lines_of_unmade_rounds(self.history):
            self.write(entry)

    def statement(self, delta: float | None = None, *, stopping: Stopping = FIXED) -> Statement:
        """The privacy statement in words and numbers; ``stopping`` is as in `Statement.of`."""
        return Statement.of([self], self._delta(delta), stopping=stopping)

    def check_continues(self, end: End) -> None:
        """Refuse a ledger that does not extend that of a checkpoint, which had this end.

        Raises
        ------
        FedsimError
            If lines of the checkpoint are missing, or changed.
        """
        if not self.continues(end):
            raise FedsimError(
                f"ledger {self.path or 'in memory'} does not continue the checkpoint's, which had "
                f"{end.lines} lines up to {end.head}; restore the one that the run wrote."
            )

    def _delta(self, delta: float | None) -> float:
        value = self.delta if delta is None else delta
        if value is None:
            raise FedsimError("delta was given neither to the ledger nor to this question.")
        return value

    # Flower's PrivacyAccountant protocol.

    @property
    def config(self) -> PrivacyConfig:
        """The ledger's settings as Flower's record.

        Raises
        ------
        FedsimError
            If there is no delta, or no declared event with a population.
        """
        return privacy_config(self.declared, self.delta, self.max_epsilon)

    @property
    def num_releases(self) -> int:
        """Mechanism invocations charged."""
        return self.history.releases

    def compose(self, event: Event | GaussianPrivacyEvent, count: int = 1) -> None:
        """Record an event for Flower: without round or run, and without a budget.

        Independent sampling is then declared by the user, since Flower's own strategies draw a
        fixed number of clients.
        """
        own_event = event_of(event, self.declared).times(count)
        is_declared = not isinstance(event, Event) and own_event.law.rate < 1
        is_declared = is_declared and not isinstance(own_event.law, FixedSizeLaw)
        self.write(Entry(event=own_event, declared_by_user=is_declared))

    def get_epsilon(self, delta: float) -> float:
        """`epsilon`."""
        return self.epsilon(delta)

    def get_delta(self, epsilon: float) -> float:
        """Smallest delta known at this epsilon."""
        return self.history.accountant.delta(epsilon)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """`cost` as Flower's record."""
        return privacy_spent(self.cost(delta))

    def state_dict(self) -> dict[str, object]:
        """The ledger's lines, for a checkpoint."""
        return {"lines": [line.decode() for line in self.lines]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load a checkpointed ledger.

        A ledger on disk is never replaced: it must extend the checkpointed one, and its later
        lines stay charged.

        Raises
        ------
        FedsimError
            If the lines are not a ledger's, or are not the beginning of the one on disk.
        """
        lines = state.get("lines")
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise FedsimError("a ledger's state must hold its lines.")
        data = [line.encode() for line in lines]
        if self.path is None:
            self._clear()
            if data:
                self._load(b"\n".join([*data, b""]))
        elif self.lines[: len(data)] != data:
            raise FedsimError(f"ledger {self.path} does not continue the checkpointed one.")

"""The ledger: every release, on disk before it happens.

A file of JSON lines, append-only and chained by hashes: a header, then one line for each event.
It needs nothing else to recompute epsilon. Ledgers in ``archive/`` beside it are its
predecessors, and count.

A last line without its newline was being written when the machine stopped. `record` had
not returned, so nothing was released; the ledger counts it as spent all the same, at a cost
no smaller than any event it knows of, until a run with the same draws records that very
release again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Cost, check_delta
from fedsim.privacy.claims import FIXED, Stopping
from fedsim.privacy.digest import Fingerprints
from fedsim.privacy.durable import archived
from fedsim.privacy.entry import Entry, History, Placement
from fedsim.privacy.events import Event
from fedsim.privacy.flower_records import event_of, privacy_config, privacy_spent
from fedsim.privacy.laws import FixedSizeLaw
from fedsim.privacy.ledger_file import Budget, LedgerFile
from fedsim.privacy.statement import Statement

if TYPE_CHECKING:
    from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent

    from fedsim.privacy.plan import Bounded, ReleasePlan


class Ledger(LedgerFile):
    """Releases so far, written down before each; epsilon at any time.

    Satisfies Flower's ``flwr.serverapp.PrivacyAccountant`` protocol, so Flower's own DP
    strategies can use one too.

    Parameters
    ----------
    path : path or None
        A file to continue or, on the first record, to create. None: in memory only.
    delta : float or None
        Of every epsilon that is asked for without one.
    max_epsilon : float or None
        Budget of `record` and `would_exceed`, where they are given none.
    declared : Event or None
        What one planned round costs. A torn line is counted at no less, and Flower's
        protocol takes sampler and population from it.
    read_only : bool
        Nothing is repaired on disk and nothing can be recorded.

    Raises
    ------
    FedsimError
        If the file is no ledger, or was changed after it was written, or what is archived
        beside it does not compose with what is declared.
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
        if declared is not None:  # what cannot be added up is refused before any release
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
        """A ledger that is there, read-only.

        Raises
        ------
        FedsimError
            If there is no such file, or it is no ledger, or was changed after it was written.
        """
        if not Path(path).is_file() and not archived(Path(path)):
            raise FedsimError(f"there is no ledger at {path}.")
        return cls(path, delta=delta, declared=declared, read_only=True)

    def record(
        self, entry: Entry, *, max_epsilon: float | None = None, delta: float | None = None
    ) -> bool:
        """Write a release down; when this returns it is on the disk, and may be made.

        Parameters
        ----------
        entry : Entry
        max_epsilon, delta : float, optional
            A budget in place of the ledger's own. No other process writes between the check of
            the budget and the line.

        Returns
        -------
        bool
            False if the same release is in the ledger already: entropy "config" and the same run,
            release digest, round, attempt and event, at client level the same ``sum`` and at
            example level the same client and fingerprint. It is not charged again. Without
            ``sum`` the caller answers for the release being the same.

        Raises
        ------
        BudgetSpentError
            If the budget does not allow it.
        FedsimError
            If the level or adjacency is not that of the ledger; if this round of this run was
            recorded with another sum, or of other data, and its noise follows from the seed; or if
            the file was changed by something other than a ledger.
        """
        if self.read_only:
            raise FedsimError(f"ledger {self.path} was opened for reading only.")
        if entry.level == "example" and entry.event.adjacency == "add-remove":
            raise FedsimError(
                "adjacency is 'add-remove'; at example level it must be zero-out (or "
                "replace-one): how many examples a client has is public there."
            )
        most = self.max_epsilon if max_epsilon is None else max_epsilon
        budget = None
        if most is not None and most < math.inf:
            budget = Budget(most, self._delta(delta))
        return self.write(entry, budget)

    @contextmanager
    def release(
        self, plan: ReleasePlan[Bounded], round: int, placement: Placement = "server"
    ) -> Iterator[Entry]:
        """Write a round of somebody else's loop down, and then let it be made.

        Everything about what is drawn and added is declared by the user. A round that is made
        again, after an interruption, is charged again::

            with ledger.release(plan, round):
                model += noisy_mean(updates)

        Parameters
        ----------
        plan : ReleasePlan
        round : int
            From 1 on.
        placement : "server" or "client"
            Who draws the noise: the one who sums, or each client, before anything leaves it.

        Yields
        ------
        Entry
            Its line, which is on the disk.

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
        """HMAC of these parts under the key beside the ledger."""
        return self._fingerprints.of(parts)

    @property
    def run(self) -> str:
        """A name of the run that writes it: no other run's, and the same once it is resumed."""
        return self.fingerprint([b"run"])

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Releases in this ledger so far, torn lines included."""
        return tuple(self._entries)

    @property
    def charged(self) -> tuple[Entry, ...]:
        """What is charged, the archive's first; no torn line whose release was recorded after
        all, and no planned release that was made after all."""
        return tuple(self.history.net)

    @property
    def rounds_made(self) -> int:
        """The last round that this run has recorded."""
        return max((entry.round or 0 for entry in self.history.of_this_run), default=0)

    def cost(self, delta: float | None = None) -> Cost:
        """Epsilon spent so far, how it was found, and what stands beside it."""
        cost = self.history.accountant.cost(self._delta(delta))
        return replace(cost, releases=self.history.releases)

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon charged so far; milliseconds, however many rounds are in the ledger."""
        return self.history.accountant.epsilon(self._delta(delta))

    def as_of(self, round: int, release: str | None) -> History:
        """What was charged after a round of a run that repeats later ones, having been resumed.

        Parameters
        ----------
        round : int
        release : str or None
            The run's digest. What it has recorded of later rounds, and will release again to the
            same bytes, is left out; releases drawn by the system stay, and so does all else.
        """

        def is_repeated(entry: Entry) -> bool:
            later = entry.round is not None and entry.round > round
            return later and entry.release == release is not None and entry.entropy == "config"

        entries = self._entries
        if not entries or not is_repeated(entries[-1]):
            return self.history
        run = entries[-1].run
        others = (e for e in self.history.of_this_run if e.run != run or not is_repeated(e))
        return History([*self.history.before, *others])

    def would_exceed(
        self,
        event: Entry | Event | GaussianPrivacyEvent,
        max_epsilon: float | None = None,
        count: int = 1,
        *,
        delta: float | None = None,
    ) -> bool:
        """Whether this would spend more than ``max_epsilon``; records nothing.

        Parameters
        ----------
        event : Entry, Event or GaussianPrivacyEvent
            An entry that `record` would not charge again costs nothing more; its ``sum`` is
            ignored (`record` refuses another one).
        max_epsilon, delta : float, optional
            In place of the ledger's own.
        count : int
            How often, where it is an event.
        """
        budget = self.max_epsilon if max_epsilon is None else max_epsilon
        if budget is None:
            raise FedsimError("max_epsilon was given neither to the ledger nor to would_exceed.")
        self.refresh()
        if isinstance(event, Entry):
            planned = replace(event, sum=None)
        else:
            planned = Entry(event=event_of(event, self.declared).times(count), level=self.level)
        made = (replace(line, sum=None) for line in self.attempts(planned))
        if any(planned.repeats(line) for line in made):
            return self.epsilon(delta) > budget
        if self.began(planned, upto=',"mechanism":'):
            planned = replace(planned, settles=True)
        return self.history.after(planned).epsilon(self._delta(delta)) > budget

    def charge_planned(self, stopping: Stopping) -> None:
        """Charge the planned rounds of a run that what it has released has ended.

        As often as it is asked: what is charged already is not charged again. A run that is resumed
        makes them at no further cost.
        """
        for entry in stopping.unmade(self.history):
            self.record(entry, max_epsilon=math.inf)

    def statement(self, delta: float | None = None, *, stopping: Stopping = FIXED) -> Statement:
        """The privacy statement in words and numbers; ``stopping`` as of `Statement.of`."""
        return Statement.of([self], self._delta(delta), stopping=stopping)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it: the hash of its last line, and how many there are."""
        return {"head": self.head, "lines": len(self.heads)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Check that this ledger continues a checkpoint's; lines beyond it stay charged.

        Raises
        ------
        FedsimError
            If lines that the checkpoint knew are missing, or are others.
        """
        lines = int(state["lines"])
        if lines and (self.heads[lines - 1 : lines] or [""])[0] != state["head"]:
            raise FedsimError(
                f"ledger {self.path or 'in memory'} does not continue the checkpoint's, which had "
                f"{lines} lines up to {state['head']}; put back the one that the run wrote."
            )

    def _delta(self, delta: float | None) -> float:
        chosen = self.delta if delta is None else delta
        if chosen is None:
            raise FedsimError("delta was given neither to the ledger nor to this question.")
        return chosen

    # Flower's PrivacyAccountant protocol.

    @property
    def config(self) -> PrivacyConfig:
        """Flower's view of what is accounted for.

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
        """`record` as Flower calls it: nothing is known but the event, and no budget refuses it.

        That clients are drawn independently is then declared by the user: Flower's own strategies
        draw a fixed number.
        """
        ours = event_of(event, self.declared).times(count)
        declared = not isinstance(event, Event) and ours.law.rate < 1
        declared = declared and not isinstance(ours.law, FixedSizeLaw)
        self.record(Entry(event=ours, declared_by_user=declared), max_epsilon=math.inf)

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

        A ledger on disk is never replaced: it must continue the checkpointed one, and what
        it holds beyond stays charged.

        Raises
        ------
        FedsimError
            If the lines are not a ledger's, or not the beginning of the one on disk.
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

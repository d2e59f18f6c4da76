"""The ledger: every release, on disk before it happens.

A file of JSON lines, append-only and chained by hashes: a header, then one line an event. It
needs nothing else to recompute epsilon. Ledgers in ``archive/`` beside it are its
predecessors, and count.

A last line without its newline was being written when the machine stopped. `record` had
not returned, so nothing was released; the ledger counts it as spent all the same, at a cost
no smaller than any event it knows of, until a run with the same draws records that very
release again.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, Cost, check_delta
from fedsim.privacy.claims import FIXED, Spending, Stopping
from fedsim.privacy.durable import Fingerprints, archived
from fedsim.privacy.entry import Entropy, Entry, Fact, Placement
from fedsim.privacy.events import Event
from fedsim.privacy.laws import FixedSizeLaw, Level
from fedsim.privacy.ledger_file import Budget, LedgerFile
from fedsim.privacy.statement import Statement

if TYPE_CHECKING:
    from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent


class Ledger:
    """Releases so far, written down before each; epsilon at any time.

    Satisfies Flower's ``flwr.serverapp.PrivacyAccountant`` protocol, so Flower's own DP
    strategies can use one too.

    Parameters
    ----------
    path : path or None
        A file to continue or, on the first record, to create. None: in memory only.
    delta : float or None
        At which epsilon is asked when nothing else is said.
    max_epsilon : float or None
        Budget of `would_exceed` when nothing else is said.
    declared : Event or None
        What one planned round costs. A torn line is counted at no less, and Flower's
        protocol takes sampler and population from it.

    Raises
    ------
    FedsimError
        If the file is no ledger, or was changed after it was written, or what is archived
        beside it does not compose with what is declared.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        delta: float | None = None,
        max_epsilon: float | None = None,
        declared: Event | None = None,
    ) -> None:
        if delta is not None:
            check_delta(delta)
        self.path = None if path is None else Path(path)
        self.delta = delta
        self.max_epsilon = max_epsilon
        self.declared = declared
        self._read_only = False
        self._file = LedgerFile(self.path, planned=declared)
        self._fingerprints = Fingerprints(None if self.path is None else self.path.parent)
        self._check_declared()

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        delta: float | None = None,
        declared: Event | None = None,
    ) -> Self:
        """A ledger file to look at: nothing is repaired on disk and nothing can be recorded.

        Raises
        ------
        FedsimError
            If there is no such file, or it is no ledger, or was changed after it was written.
        """
        ledger = cls(delta=delta, declared=declared)
        ledger.path, ledger._read_only = Path(path), True
        if not ledger.path.is_file() and not archived(ledger.path):
            raise FedsimError(f"there is no ledger at {path}.")
        ledger._file = LedgerFile(ledger.path, planned=declared, read_only=True)
        ledger._check_declared()
        return ledger

    def record(
        self,
        *,
        event: Event,
        round: int | None = None,
        level: Level = "client",
        entropy: Entropy = "system",
        mechanism: str = "",
        clip_norm: float | None = None,
        release: str | None = None,
        attempt: int = 0,
        client: int | None = None,
        fingerprint: str | None = None,
        placement: Placement = "",
        declared_by_user: bool = False,
        public: Mapping[str, Fact] | None = None,
        run: str | None = None,
        sum: str | None = None,
        max_epsilon: float | None = None,
        delta: float | None = None,
    ) -> bool:
        """Write a release down; when this returns it is on the disk, and may be made.

        Parameters are those of `Entry`, and a budget in the place of the ledger's own. No other
        process writes between the check of the budget and the line.

        Returns
        -------
        bool
            False if the same release stood there already: entropy "config" and the same run,
            release digest, round, attempt and event, at client level the same ``sum`` and at
            example level the same client and fingerprint. It is not charged again. Without
            ``sum`` it is the caller's word that the release is the same.

        Raises
        ------
        BudgetSpentError
            If the budget does not allow it.
        FedsimError
            If the level or adjacency is not that of the ledger; if this round of this run was
            recorded with another sum, or of other data, and its noise follows from the seed; or if
            the file was changed by something other than a ledger.
        """
        if self._read_only:
            raise FedsimError(f"ledger {self.path} was opened for reading only.")
        if level == "example" and event.adjacency == "add-remove":
            raise FedsimError(
                "adjacency is 'add-remove'; at example level it must be zero-out (or "
                "replace-one): how many examples a client has is public there."
            )
        entry = Entry(
            event=event, round=round, level=level, entropy=entropy, mechanism=mechanism,
            clip_norm=clip_norm, release=release, attempt=attempt, client=client,
            fingerprint=fingerprint, placement=placement, declared_by_user=declared_by_user,
            public=dict(public or {}), run=run, sum=sum,
        )  # fmt: skip
        most = self.max_epsilon if max_epsilon is None else max_epsilon
        budget = None
        if most is not None and most < math.inf:
            budget = Budget(most, self._delta(delta))
        return self._file.write(entry, budget)

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
        return tuple(self._file.history.entries)

    @property
    def charged(self) -> tuple[Entry, ...]:
        """What is charged, the archive's first; no torn line whose release was recorded after
        all."""
        return tuple(self._file.history.charged)

    @property
    def before(self) -> tuple[Entry, ...]:
        """Those of the charged ones that archived ledgers recorded."""
        return self._file.history.before

    @property
    def of_this_run(self) -> tuple[Entry, ...]:
        """What would be charged without the archive."""
        return self._file.history.of_this_run

    @property
    def rounds_made(self) -> int:
        """The last round that this run has recorded."""
        return max((entry.round or 0 for entry in self.of_this_run), default=0)

    @property
    def counts(self) -> Counter[Event]:
        """How often each event is charged."""
        return Counter(self._file.history.counts)

    @property
    def private(self) -> bool:
        """Whether all that is charged has a guarantee."""
        return self._file.history.accountant.private

    @property
    def last_event(self) -> Event | None:
        """What the release charged last has cost; None without any."""
        charged = self._file.history.charged
        return charged[-1].event if charged else None

    @property
    def level(self) -> Level:
        """What a row is; "client" until something is recorded."""
        return self._file.level

    @property
    def head(self) -> str:
        """Hash of the last line, and by it of the whole ledger."""
        return self._file.head

    @property
    def heads(self) -> tuple[str, ...]:
        """Hash after each line: a ledger that was continued still has its earlier heads."""
        return tuple(self._file.heads)

    def cost(self, delta: float | None = None) -> Cost:
        """Epsilon spent so far, how it was found, and what stands beside it."""
        return self._file.history.accountant.cost(self._delta(delta))

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon spent so far; milliseconds, however many rounds are in the ledger."""
        return self._file.history.accountant.epsilon(self._delta(delta))

    def as_of(self, round: int, release: str | None) -> Spending:
        """This ledger as it was after a round of a run that goes through later ones again.

        Parameters
        ----------
        round : int
        release : str or None
            The run's digest. What it has recorded of later rounds, and will release again to the
            same bytes, is left out; releases drawn by the system stay, and so does all else.
        """
        entries = self._file.history.entries
        if not entries or not _comes_again(entries[-1], round, release):
            return self
        run = entries[-1].run
        later = (e for e in self.of_this_run if _comes_again(e, round, release) and e.run == run)
        again = {id(entry) for entry in later}
        return _Spent(e for e in self.charged if id(e) not in again)

    def would_exceed(
        self,
        event: Event | GaussianPrivacyEvent,
        max_epsilon: float | None = None,
        count: int = 1,
        *,
        delta: float | None = None,
        round: int | None = None,
        level: Level | None = None,
        entropy: Entropy = "system",
        release: str | None = None,
        attempt: int = 0,
        client: int | None = None,
        fingerprint: str | None = None,
        run: str | None = None,
    ) -> bool:
        """Whether this event would spend more than ``max_epsilon``; records nothing.

        With the names under which `record` would write it down, a release that stands there
        already costs nothing more (`record` refuses another sum).
        """
        budget = self.max_epsilon if max_epsilon is None else max_epsilon
        if budget is None:
            raise FedsimError("max_epsilon was given neither to the ledger nor to would_exceed.")
        self.refresh()
        planned = Entry(
            event=self._ours(event).times(count), round=round, level=level or self.level,
            entropy=entropy, release=release, attempt=attempt, client=client,
            fingerprint=fingerprint, run=run,
        )  # fmt: skip
        spent = self._file.history
        made = (replace(line, sum=None) for line in spent.attempts(planned))
        if any(planned.repeats(line) for line in made):
            return self.epsilon(delta) > budget
        if self._file.began(planned, upto=',"mechanism":'):
            planned = replace(planned, settles=True)
        return spent.after(planned).epsilon(self._delta(delta)) > budget

    def statement(self, delta: float | None = None, *, stopping: Stopping = FIXED) -> Statement:
        """The privacy statement in words and numbers; ``stopping`` as of `Statement.of`."""
        return Statement.of([self], self._delta(delta), stopping=stopping)

    def accountant(self) -> Accountant:
        """What is charged, to go on with elsewhere."""
        return self._file.history.accountant.copy()

    def refresh(self) -> None:
        """Take up what another process has written since."""
        self._file.refresh()

    def state(self) -> dict[str, Any]:
        """Where it stands, for a checkpoint: the hash of its last line, and how many there are."""
        return {"head": self.head, "lines": len(self._file.heads)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Make sure that this ledger goes on from a checkpoint; what is beyond stays charged.

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

    # Flower's PrivacyAccountant protocol.

    @property
    def config(self) -> PrivacyConfig:
        """Flower's view of what is accounted for."""
        from fedsim.privacy.flower_records import privacy_config

        return privacy_config(self.declared, self.delta, self.max_epsilon)

    @property
    def num_releases(self) -> int:
        """Mechanism invocations charged."""
        return self._file.history.accountant.releases

    def compose(self, event: Event | GaussianPrivacyEvent, count: int = 1) -> None:
        """`record` as Flower calls it: nothing is known but the event, and no budget refuses it.

        That clients are drawn independently is then whoever declares it to say: Flower's own
        strategies draw a fixed number.
        """
        ours = self._ours(event).times(count)
        word = not isinstance(event, Event) and ours.law.rate < 1
        word = word and not isinstance(ours.law, FixedSizeLaw)
        self.record(event=ours, declared_by_user=word, max_epsilon=math.inf)

    def get_epsilon(self, delta: float) -> float:
        """`epsilon`."""
        return self.epsilon(delta)

    def get_delta(self, epsilon: float) -> float:
        """Smallest delta known at this epsilon."""
        return self._file.history.accountant.delta(epsilon)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """`cost` as Flower's record."""
        from fedsim.privacy.flower_records import privacy_spent

        return privacy_spent(self.cost(delta))

    def state_dict(self) -> dict[str, object]:
        """The ledger's lines, for a checkpoint."""
        return {"lines": [line.decode() for line in self._file.lines]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take up a checkpointed ledger.

        A ledger on disk is never replaced: it must go on from the checkpointed one, and what
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
        if self.path is not None:
            if self._file.lines[: len(data)] != data:
                raise FedsimError(f"ledger {self.path} does not continue the checkpointed one.")
            return
        self._file.load_lines(data)

    def _check_declared(self) -> None:
        """Refuse what cannot be added up, before anything is released."""
        if self.declared is not None:
            self._file.history.after(Entry(event=self.declared))

    def _delta(self, delta: float | None) -> float:
        chosen = self.delta if delta is None else delta
        if chosen is None:
            raise FedsimError("delta was given neither to the ledger nor to this question.")
        return chosen

    def _ours(self, event: Event | GaussianPrivacyEvent) -> Event:
        if isinstance(event, Event):
            return event
        from fedsim.privacy.flower_records import our_event

        return our_event(event, self.declared)


def _comes_again(entry: Entry, round: int, release: str | None) -> bool:
    later = entry.round is not None and entry.round > round
    return later and entry.release == release is not None and entry.entropy == "config"


class _Spent:
    """What some entries cost."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._accountant = Accountant()
        self.counts: Counter[Event] = Counter()
        self._last: Event | None = None
        for entry in entries:
            self._accountant.add(entry.event)
            self.counts[entry.event.once] += entry.event.count
            self._last = entry.event

    @property
    def last_event(self) -> Event | None:
        return self._last

    def accountant(self) -> Accountant:
        return self._accountant.copy()

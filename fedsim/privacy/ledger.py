"""The ledger: every release, on disk before it happens.

A file of JSON lines, one an event, append-only and chained by hashes: a line changed,
removed or swapped is found out. It needs nothing else to recompute epsilon. What a chain
cannot show is that whole lines are missing at its end; who needs that keeps `Ledger.head`
elsewhere (a checkpoint does).

A last line without its newline was being written when the machine stopped. `record` had
not returned, so nothing was released; the ledger counts it as spent all the same, at a cost
no smaller than any event it knows of, until a run with the same draws records that very
release again.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, Cost, check_delta
from fedsim.privacy.chain import (
    GENESIS,
    append_durably,
    opened,
    replace_durably,
    sealed,
    split,
)
from fedsim.privacy.entry import Entropy, Entry, event_in
from fedsim.privacy.events import Event, Level, dominating_event
from fedsim.privacy.statement import Statement

if TYPE_CHECKING:
    from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent

__all__ = ["Ledger"]


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
        If the file was changed after it was written.
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
        self._clear()
        if self.path is not None and self.path.exists():
            self._load(self.path.read_bytes(), repair=True)

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, delta: float | None = None) -> Self:
        """A ledger file to look at: nothing is repaired on disk and nothing can be recorded.

        Raises
        ------
        FedsimError
            If there is no such file, or it was changed after it was written.
        """
        ledger = cls(delta=delta)
        ledger.path, ledger._read_only = Path(path), True
        if not ledger.path.is_file():
            raise FedsimError(f"there is no ledger at {path}.")
        ledger._load(ledger.path.read_bytes(), repair=False)
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
        draws: str | None = None,
        client: int | None = None,
    ) -> bool:
        """Write a release down; when this returns it is on the disk, and may be made.

        Returns
        -------
        bool
            False if the same release stood there already: same round, event, mechanism and
            clip norm under the same ``draws``, entropy "config". It is not charged again.

        Raises
        ------
        FedsimError
            If the level or adjacency is not that of the ledger, or somebody else wrote to
            the file meanwhile.
        """
        if self._read_only:
            raise FedsimError(f"ledger {self.path} was opened for reading only.")
        if self.entries and level != self.level:
            raise FedsimError(
                f"level is {level!r}; this ledger is about {self.level} level, and guarantees of "
                "different levels do not add up."
            )
        entry = Entry(
            event=event, round=round, level=level, entropy=entropy, mechanism=mechanism,
            clip_norm=clip_norm, draws=draws, client=client,
        )  # fmt: skip
        repeatable = entropy == "config" and draws is not None
        if repeatable and entry.release in self._seen:
            return False
        if repeatable and self._began(entry):
            entry = replace(entry, settles=True)
        # Refuses an event that does not compose before anything is written.
        self._after(entry)
        self._append(entry)
        return True

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Lines so far, torn ones included."""
        return tuple(self._entries)

    @property
    def charged(self) -> tuple[Entry, ...]:
        """Lines that are charged: all but torn ones whose release was recorded after all."""
        settled = {at for at, entry in enumerate(self._entries[1:]) if entry.settles}
        return tuple(entry for at, entry in enumerate(self._entries) if at not in settled)

    @property
    def level(self) -> Level:
        """What a row is; "client" until something is recorded."""
        return self._entries[0].level if self._entries else "client"

    @property
    def head(self) -> str:
        """Hash of the last line, and by it of the whole ledger."""
        return self._head

    @property
    def heads(self) -> tuple[str, ...]:
        """Hash after each line: a ledger that was continued still has its earlier heads."""
        return tuple(self._heads)

    def cost(self, delta: float | None = None) -> Cost:
        """Epsilon spent so far, how it was found, and what stands beside it."""
        return self._accountant.cost(self._delta(delta))

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon spent so far; milliseconds, however many rounds are in the ledger."""
        return self._accountant.epsilon(self._delta(delta))

    def would_exceed(
        self,
        event: Event | GaussianPrivacyEvent,
        max_epsilon: float | None = None,
        count: int = 1,
        *,
        delta: float | None = None,
        round: int | None = None,
        draws: str | None = None,
    ) -> bool:
        """Whether this event would spend more than ``max_epsilon``; records nothing.

        With the ``round`` and ``draws`` of a run whose entropy is its config's, a release
        that stands in the ledger already costs nothing more.
        """
        budget = self.max_epsilon if max_epsilon is None else max_epsilon
        if budget is None:
            raise FedsimError("max_epsilon was given neither to the ledger nor to would_exceed.")
        planned = self._ours(event).times(count)
        accountant = self._accountant
        if draws is not None:
            if (round, draws, planned) in self._rounds:
                return accountant.epsilon(self._delta(delta)) > budget
            entry = Entry(
                event=planned, round=round, draws=draws, level=self.level, entropy="config"
            )
            if self._untorn is not None and self._began(entry, upto=',"mechanism":'):
                accountant = self._untorn
        return accountant.would_exceed(planned, budget, self._delta(delta))

    def statement(self, delta: float | None = None) -> Statement:
        """The privacy statement in words and numbers."""
        charged = self.charged
        return Statement(
            cost=self.cost(delta),
            level=self.level,
            samplers=tuple(sorted({entry.event.sampler for entry in charged})),
            entropies=tuple(sorted({entry.entropy for entry in charged})),
            torn=sum(entry.kind == "torn" for entry in charged),
            ledger=None if self.path is None else str(self.path),
        )

    # Flower's PrivacyAccountant protocol.

    @property
    def config(self) -> PrivacyConfig:
        """Flower's view of what is accounted for."""
        from fedsim.privacy.flower_records import privacy_config

        return privacy_config(self.declared, self.delta, self.max_epsilon)

    @property
    def num_releases(self) -> int:
        """Mechanism invocations recorded."""
        return self._accountant.releases

    def compose(self, event: Event | GaussianPrivacyEvent, count: int = 1) -> None:
        """`record` as Flower calls it: nothing is known but the event."""
        self.record(event=self._ours(event).times(count))

    def get_epsilon(self, delta: float) -> float:
        """`epsilon`."""
        return self.epsilon(delta)

    def get_delta(self, epsilon: float) -> float:
        """Smallest delta known at this epsilon."""
        return self._accountant.delta(epsilon)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """`cost` as Flower's record."""
        from fedsim.privacy.flower_records import privacy_spent

        return privacy_spent(self.cost(delta))

    def state_dict(self) -> dict[str, object]:
        """The ledger's lines, for a checkpoint."""
        return {"lines": [line.decode() for line in self._lines]}

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
            if self._lines[: len(data)] != data:
                raise FedsimError(f"ledger {self.path} does not continue the checkpointed one.")
            return
        self._clear()
        self._load(b"".join(line + b"\n" for line in data), repair=False)

    # What is kept, and the file.

    def _clear(self) -> None:
        self._entries: list[Entry] = []
        self._lines: list[bytes] = []
        self._size = 0
        self._heads: list[str] = []
        self._head = GENESIS
        self._seen: set[tuple[object, ...]] = set()
        self._rounds: set[tuple[int | None, str, Event]] = set()
        self._distinct: set[Event] = set()
        self._accountant = Accountant()
        self._untorn: Accountant | None = None

    def _after(self, entry: Entry) -> Accountant:
        """The accountant once ``entry`` is counted."""
        settled = entry.settles and self._untorn is not None
        accountant = (self._untorn if settled else self._accountant) or Accountant()
        accountant = accountant.copy()
        accountant.add(entry.event)
        return accountant

    def _take(self, entry: Entry, line: bytes, head: str) -> None:
        accountant = self._after(entry)
        self._untorn = self._accountant if entry.kind == "torn" else None
        self._accountant = accountant
        self._entries.append(entry)
        self._lines.append(line)
        self._size += len(line) + 1
        self._heads.append(head)
        self._head = head
        self._distinct.add(entry.event)
        if entry.kind == "release" and entry.entropy == "config" and entry.draws is not None:
            self._seen.add(entry.release)
            self._rounds.add((entry.round, entry.draws, entry.event))

    def _append(self, entry: Entry) -> None:
        line, head = sealed(entry.to_dict(), self._head)
        if self.path is not None:
            append_durably(self.path, line, expected_size=self._size)
        self._take(entry, line[:-1], head)

    def _load(self, data: bytes, *, repair: bool) -> None:
        lines, rest = split(data)
        for number, line in enumerate(lines, start=1):
            self._take(*self._opened(line, number))
        if not rest:
            return
        try:
            whole = self._opened(rest, len(lines) + 1)
        except FedsimError:
            torn = self._torn(rest)
            line, head = sealed(torn.to_dict(), self._head)
            whole = (torn, line[:-1], head)
        self._take(*whole)
        if repair and self.path is not None:
            replace_durably(self.path, b"".join(line + b"\n" for line in self._lines))

    def _opened(self, line: bytes, number: int) -> tuple[Entry, bytes, str]:
        try:
            data, head = opened(line, self._head)
            return Entry.from_dict(data), line, head
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = str(error) if isinstance(error, FedsimError) else "it is not a ledger's line."
            raise FedsimError(
                f"ledger {self.path or 'state'}, line {number}: {reason} A ledger that was "
                "changed after it was written proves nothing."
            ) from error

    def _torn(self, rest: bytes) -> Entry:
        """An entry at least as costly as whatever the torn line was to say."""
        known = [*self._distinct]
        known += [self.declared] if self.declared is not None else []
        fragment = rest.decode("ascii", "backslashreplace")
        legible = event_in(fragment)
        known += [legible] if legible is not None else []
        bound = dominating_event(known) or Event(noise_multiplier=0.0, guarantee=False)
        entropies: set[Entropy] = {entry.entropy for entry in self._entries}
        return Entry(
            kind="torn",
            event=bound,
            level=self.level,
            entropy="config" if entropies == {"config"} else "system",
            fragment=fragment,
        )

    def _began(self, entry: Entry, upto: str = ',"time":') -> bool:
        """Whether the torn last line is the beginning of this one."""
        if self._untorn is None:
            return False
        fragment = self._entries[-1].fragment
        text = json.dumps(entry.to_dict(), separators=(",", ":"), allow_nan=False)
        text = text[: text.index(upto)]
        return text.startswith(fragment) or fragment.startswith(text)

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

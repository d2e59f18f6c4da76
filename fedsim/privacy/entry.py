"""Entries: what one line of a ledger says, and what all lines amount to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any, Literal

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Law, Level
from fedsim.privacy.laws.declared import DeclaredLaw
from fedsim.privacy.records import read_record, to_json
from fedsim.settings import Ge, check_settings

Kind = Literal["release", "evaluation", "torn", "planned"]
Entropy = Literal["config", "system"]
Placement = Literal["", "server", "client"]
Fact = str | int | float | bool | None
Place = tuple[Kind, str | None, str | None, int | None, int | None]
DECLARED = "declared"
"""Among an entry's public facts: the user answers for this part of the plan."""

_NOTED = ("run", "sum")
_UNHASHED = (*_NOTED, "version")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a ledger: what was released, and nothing about when, where or by what.

    Attributes
    ----------
    kind : "release", "evaluation", "torn" or "planned"
        A round's release; that of the clients' metrics in a round; what stands for an
        unreadable last line, counted at the cost of ``event``; or releases that were planned after
        this round, counted likewise, of a run that what it has released has ended.
    round : int or None
    attempt : int
        How often the round was drawn before; each attempt is charged.
    release : str or None
        Digest of all settings that the release follows from (or a number used once, for a
        trainer without a config); None where nothing identifies it.
    client : int or None
        Whose ledger this is, at example level.
    fingerprint : str or None
        A client's HMAC of its data and of what it received, under a key of its own.
    level : "client" or "example"
        What a row of the released sum is.
    entropy : "config" or "system"
        Where noise and samples came from: the seed, or the operating system.
    event : Event
    mechanism : str
    clip_norm : float or None
    placement : "", "server" or "client"
        Where the noise was drawn; "" where that is unknown.
    declared_by_user : bool
        Whether the user alone answers for the event being true of what was drawn and added.
    public : mapping of str to str, number, bool or None
        What else was taken as public: a population or number of examples, steps, a
        denominator; ``rows`` says how it is known that each is of one example ("by structure",
        "one at a time: user code"; in older ledgers "probed"), and ``bound``, ``sampler`` or
        ``noise`` that the user declares it ("declared").
    settles : bool
        Whether this is the release that the torn line just before it began.
    fragment : str
        What was written of a torn line.
    run : str or None
        Which run's directory a release belongs to, in a ledger that several runs share; or, of a
        strategy without a release digest, an HMAC of what keys its draws.
    sum : str or None
        HMAC of the exact sum that was released, under a key beside the ledger. It and ``run`` are
        noted beside the hashed part of a line, so that equal runs have equal heads.
    version : int
        Of the format that it was read from; not written into a line.

    Raises
    ------
    FedsimError
        If a value is of the wrong type or out of range.
    """

    # In this order in a line: a torn one is recognised by as much of it as was written.
    kind: Kind = "release"
    round: Annotated[int | None, Ge(0)] = None
    attempt: Annotated[int, Ge(0)] = 0
    release: str | None = None
    client: Annotated[int | None, Ge(0)] = None
    fingerprint: str | None = None
    level: Level = "client"
    entropy: Entropy = "system"
    event: Event
    mechanism: str = ""
    clip_norm: Annotated[float | None, Ge(0)] = None
    placement: Placement = ""
    declared_by_user: bool = False
    public: Mapping[str, Fact] = field(default_factory=dict)
    settles: bool = False
    fragment: str = ""
    run: str | None = None
    sum: str | None = None
    version: int = field(default=2, compare=False)

    def __post_init__(self) -> None:
        check_settings(self, "an entry's ")
        if not all(map(_is_fact, self.public.items())):
            raise FedsimError(
                f"an entry's public is {self.public!r}; it must be a table of text, finite "
                "numbers, true or false."
            )
        object.__setattr__(self, "public", dict(sorted(self.public.items())))
        # For a law that is known by its data alone only its author answers.
        outside = isinstance(self.event.law, DeclaredLaw)
        object.__setattr__(self, "declared_by_user", self.declared_by_user or outside)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe mapping with kebab-case keys, in the order of the fields."""
        return to_json(self, without=_UNHASHED)

    @property
    def noted(self) -> dict[str, str]:
        """What is written beside the hashed part."""
        values = {name: getattr(self, name) for name in _NOTED}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], noted: Mapping[str, Any] | None = None, version: int = 2
    ) -> Entry:
        """Inverse of `to_dict` and `noted`.

        Raises
        ------
        FedsimError
            If a field is missing, unknown, of the wrong type or out of range.
        """
        data = {**data, "event": Event.from_dict(data.get("event"))}
        others = {name: (noted or {}).get(name) for name in _NOTED}
        return read_record(cls, data, "an entry", **others, version=version)

    @property
    def place(self) -> Place | None:
        """The kind, run, round and client of a release; None where nothing identifies it."""
        if (self.release is None and self.run is None) or self.kind == "torn":
            return None
        return (self.kind, self.run, self.release, self.round, self.client)

    @property
    def of_round(self) -> bool:
        """Whether it is what a round of training released, or a torn line, which may be."""
        return self.kind in ("release", "torn")

    @property
    def repeatable(self) -> bool:
        """Whether the same release can be made again: its noise follows from the config.

        A client's release is known by its keyed fingerprint.
        """
        known = self.level == "client" or self.fingerprint is not None
        return self.entropy == "config" and self.place is not None and known

    def repeats(self, other: Entry) -> bool:
        """Whether this is the same release as an earlier line of the same `place`."""
        same = (self.attempt, self.event) == (other.attempt, other.event)
        return self.repeatable and other.repeatable and same and not self.differs(other)

    def differs(self, other: Entry) -> bool:
        """Whether keyed hashes show that it is of other data than a line of the same `place`."""
        return (self.sum, self.fingerprint) != (other.sum, other.fingerprint)


def _is_fact(item: tuple[object, object]) -> bool:
    name, fact = item
    finite = not isinstance(fact, float) or math.isfinite(fact)
    return isinstance(name, str) and isinstance(fact, str | int | float | bool | None) and finite


class History:
    """What is charged so far, and what that costs together.

    Parameters
    ----------
    before : iterable of Entry
        Charged earlier, elsewhere: an archive.

    Attributes
    ----------
    charged : list of Entry
        The archive's and then this ledger's, without torn lines whose release was recorded
        after all.
    before : tuple of Entry
        The archive's among the charged ones.
    accountant : Accountant
        What is charged, composed.
    counts : Counter of Event
        How often each event is charged, a count of several as several.
    """

    def __init__(self, before: Iterable[Entry] = ()) -> None:
        self.charged: list[Entry] = []
        self.accountant = Accountant()
        self.counts: Counter[Event] = Counter()
        self._ahead: Counter[_Planned] = Counter()
        for entry in before:  # what an earlier run has planned no other run makes
            self.accountant.add(entry.event)
            self.charged.append(entry)
            self.counts[entry.event.once] += entry.event.count
        self.before = tuple(self.charged)
        self._unmade = sum(e.event.count for e in self.before if e.kind == "planned")

    @property
    def of_this_run(self) -> tuple[Entry, ...]:
        """What would be charged without the archive."""
        return tuple(self.charged[len(self.before) :])

    @property
    def net(self) -> list[Entry]:
        """What is charged, without the planned releases that were made after all."""
        if not any(entry.kind == "planned" for entry in self.of_this_run):
            return self.charged
        ahead, net = self._ahead.copy(), []
        for entry in reversed(self.of_this_run):
            if entry.kind == "planned":
                left = min(entry.event.count, ahead[_planned(entry)])
                ahead[_planned(entry)] -= left
                if not left:
                    continue
                entry = replace(entry, event=entry.event.once.times(left))
            net.append(entry)
        return [*self.before, *reversed(net)]

    @property
    def spent(self) -> Accountant:
        """The accountant without what this run has planned and not made."""
        if not self._ahead.total():
            return self.accountant
        net = self.net
        made = [entry for entry in net[len(self.before) :] if entry.kind != "planned"]
        return Accountant(entry.event for entry in [*self.before, *made])

    def alone(self) -> History:
        """That of this run, without earlier ones."""
        history = History()
        for entry in self.of_this_run:
            history.charge(entry)
        return history

    @property
    def rows(self) -> int | None:
        """How many rows the last release was over, if its line says so."""
        if not self.charged:
            return None
        event, public = self.charged[-1].event, self.charged[-1].public
        client = self.charged[-1].level == "client"
        declared = event.law.population if client else public.get("examples")
        return declared if isinstance(declared, int) else None

    @property
    def releases(self) -> int:
        """How many were made."""
        return self.accountant.releases - self._unmade - self._ahead.total()

    def ahead(self, event: Event, run: str | None = None) -> int:
        """How many such releases are charged that this run, or one of several, has not made."""
        return sum(
            count
            for (of_run, _, _, planned), count in self._ahead.items()
            if planned == event.once and run in (None, of_run)
        )

    def last(self, run: str | None = None) -> Entry | None:
        """The last line of this run, or of one of several; None without any."""
        of_this_run = islice(reversed(self.charged), len(self.charged) - len(self.before))
        return next((e for e in of_this_run if run in (None, e.run)), None)

    def last_round(self, run: str | None = None) -> Entry | None:
        """That of a round; where there is none, of any run."""
        rounds = [e for e in reversed(self.charged) if e.of_round]
        of_run = (e for e in rounds if run in (None, e.run))
        return next(of_run, rounds[0] if rounds else None)

    @property
    def ends_torn(self) -> bool:
        """Whether this ledger's last line is torn."""
        return len(self.charged) > len(self.before) and self.charged[-1].kind == "torn"

    def after(self, entry: Entry) -> Accountant:
        """An accountant that counts ``entry`` too.

        Raises
        ------
        FedsimError
            If its adjacency does not compose with what is here, or it counts 0, or extends a plan,
            and nothing here covers that.
        """
        if not entry.event.count and not self.counts[entry.event.once]:
            raise FedsimError(
                f"round {entry.round} counts 0, and no line before it charges the rounds that it "
                "is one of."
            )
        before = entry.event.law.continued
        if entry.event.count and before is not None and not self._covers(entry.event, before):
            raise FedsimError(
                f"round {entry.round} extends a plan of {before.rounds} rounds, and no line before "
                "it charges those."
            )
        if entry.settles and self.ends_torn:
            accountant = Accountant(charged.event for charged in self.net[:-1])
        else:
            accountant = self.accountant.copy()
        self._add(accountant, entry)
        return accountant

    def _add(self, accountant: Accountant, entry: Entry) -> None:
        if covered := self._covered(entry):
            accountant.add(entry.event.once, entry.event.count - covered)
        else:
            accountant.add(entry.event)

    def _covered(self, entry: Entry) -> int:
        """How many of these releases a planned line has charged already."""
        if entry.kind == "planned" or entry.attempt:
            return 0
        return min(entry.event.count, self._ahead[_planned(entry)])

    def _covers(self, event: Event, law: Law) -> bool:
        """Whether what is charged includes this law, with the noise of an event."""
        return any(
            made.law.covers(law) and made.noise_multiplier == event.noise_multiplier
            for made, count in self.counts.items()
            if count
        )

    def take(self, entry: Entry) -> None:
        """Count one more line."""
        self.accountant = self.after(entry)
        if entry.settles and self.ends_torn:
            torn = self.charged.pop().event
            self.counts[torn.once] -= torn.count
            if not self.counts[torn.once]:
                del self.counts[torn.once]
        self._count(entry)

    def charge(self, entry: Entry) -> None:
        """Count one more entry, whatever stands before it."""
        self._add(self.accountant, entry)
        self._count(entry)

    def _count(self, entry: Entry) -> None:
        self.charged.append(entry)
        covered = self._covered(entry)
        self.counts[entry.event.once] += entry.event.count - covered
        if entry.kind == "planned":
            self._ahead[_planned(entry)] += entry.event.count
        elif covered:
            self._ahead[_planned(entry)] -= covered


_Planned = tuple[str | None, str | None, int | None, Event]


def _planned(entry: Entry) -> _Planned:
    """By what a planned release is known once it is made."""
    return (entry.run, entry.release, entry.client, entry.event.once)

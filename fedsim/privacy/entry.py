"""Entries, the contents of a ledger's lines; and the history that they add up to."""

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
ReleaseId = tuple[Kind, str | None, str | None, int | None, int | None]
VERSION = 3
"""Format of new ledgers. In format 2 an event had rate and size next to a sampler's name."""
DECLARED = "declared"
"""Value of a public fact of an entry: the user declares this part of the plan."""

_NOTED = ("run", "sum")
_UNHASHED = (*_NOTED, "version")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Content of one ledger line: what was released, without time, host or engine.

    Attributes
    ----------
    kind : "release", "evaluation", "torn" or "planned"
        "release": the noisy sum of a round. "evaluation": noisy metrics of clients in a round.
        "torn": replaces an unreadable last line, and costs ``event``. "planned": charges the
        rounds that were planned and not made, after releases ended the run in this round.
    round : int or None
    attempt : int
        How often the round had been drawn before; each attempt is charged.
    release : str or None
        Digest of all settings that the release depends on (or a number used once, for a trainer
        without a config); None if the release cannot be identified.
    client : int or None
        The ledger's client, at example level.
    fingerprint : str or None
        A client's HMAC of its data and of what it received, under the client's key.
    level : "client" or "example"
        What a row of the released sum is.
    entropy : "config" or "system"
        Source of noise and samples: the config's seed, or the operating system.
    event : Event
        What is charged.
    mechanism : str
    clip_norm : float or None
    placement : "", "server" or "client"
        Where the noise was drawn; "" if unknown.
    declared_by_user : bool
        Whether only the user declares that the event is true of the samples and the noise.
    public : mapping of str to str, number, bool or None
        Further public facts: a population or number of examples, steps, a denominator; ``rows``,
        why each row depends on one example alone ("by structure", "one at a time: user code"; in
        older ledgers "probed"); and ``bound``, ``sampler`` or ``noise``, if it is "declared".
    settles : bool
        Whether this is the release whose writing was cut short in the torn line before it.
    fragment : str
        The readable part of a torn line.
    run : str or None
        The run that a release belongs to, in a ledger that several runs share; or, for a
        strategy without a release digest, an HMAC of the key of its draws.
    sum : str or None
        HMAC of the exact sum that was released, under a key next to the ledger. It and ``run``
        are outside the hashed part of a line, so that equal runs have equal heads.
    version : int
        Format of the ledger that the entry was read from; not written into a line.

    Raises
    ------
    FedsimError
        If a value is of the wrong type or out of range.
    """

    # The order of the fields is that of a line. A torn line is recognised by its beginning
    # (`LedgerFile.has_fragment_of`): what identifies a release comes first.
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
    version: int = field(default=VERSION, compare=False)

    def __post_init__(self) -> None:
        check_settings(self, "an entry's ")
        if not all(map(_is_fact, self.public.items())):
            raise FedsimError(
                f"an entry's public is {self.public!r}; it must be a table of text, finite "
                "numbers, true or false."
            )
        object.__setattr__(self, "public", dict(sorted(self.public.items())))
        # A law that is stored as data came from the user's code.
        has_users_law = isinstance(self.event.law, DeclaredLaw)
        object.__setattr__(self, "declared_by_user", self.declared_by_user or has_users_law)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe mapping with kebab-case keys, in the order of the fields."""
        return to_json(self, without=_UNHASHED)

    @property
    def noted(self) -> dict[str, str]:
        """Fields that are written outside the hashed part of the line."""
        return {name: value for name in _NOTED if (value := getattr(self, name)) is not None}

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], noted: Mapping[str, Any] | None = None, version: int = VERSION
    ) -> Entry:
        """Inverse of `to_dict` and `noted`.

        Raises
        ------
        FedsimError
            If a field is missing, unknown, of the wrong type or out of range.
        """
        data = {**data, "event": Event.from_dict(data.get("event"))}
        notes = {name: (noted or {}).get(name) for name in _NOTED}
        return read_record(cls, data, "an entry", **notes, version=version)

    @property
    def release_id(self) -> ReleaseId | None:
        """Kind, run, release, round and client, which identify a release; None if unidentified."""
        if (self.release is None and self.run is None) or self.kind == "torn":
            return None
        return (self.kind, self.run, self.release, self.round, self.client)

    @property
    def of_round(self) -> bool:
        """Whether it is a training round's release, or a torn line, which may have been one."""
        return self.kind in ("release", "torn")

    @property
    def repeatable(self) -> bool:
        """Whether the same release can be repeated: its noise follows from the config.

        At example level this requires the keyed fingerprint, which shows that data are unchanged.
        """
        is_identified = self.level == "client" or self.fingerprint is not None
        return self.entropy == "config" and self.release_id is not None and is_identified

    def repeats(self, other: Entry) -> bool:
        """Whether this is the same release as an earlier line of the same `release_id`."""
        if self.kind == "planned":
            return False  # `Stopping` leaves out those that are charged already
        same_charge = (self.attempt, self.event) == (other.attempt, other.event)
        return self.repeatable and other.repeatable and same_charge and not self.differs(other)

    def differs(self, other: Entry) -> bool:
        """Whether the keyed hashes differ from those of another line of the same `release_id`."""
        return (self.sum, self.fingerprint) != (other.sum, other.fingerprint)


def _is_fact(item: tuple[object, object]) -> bool:
    name, fact = item
    finite = not isinstance(fact, float) or math.isfinite(fact)
    return isinstance(name, str) and isinstance(fact, str | int | float | bool | None) and finite


class History:
    """All entries that are charged so far, and their composition.

    A planned round is charged when the run ends early; if the run is resumed and makes that round
    after all, its line is not charged again. `_planned_unmade` counts such rounds until then.

    Parameters
    ----------
    archived : iterable of Entry
        Entries of archived ledgers, which count too.

    Attributes
    ----------
    charged : list of Entry
        The archive's entries and then this ledger's, without torn lines whose release was
        recorded later.
    archived : tuple of Entry
        The archive's entries.
    accountant : Accountant
        Composition of everything charged.
    counts : Counter of Event
        Invocations charged of each event, by the event with count 1.
    """

    def __init__(self, archived: Iterable[Entry] = ()) -> None:
        self.charged: list[Entry] = []
        self.accountant = Accountant()
        self.counts: Counter[Event] = Counter()
        self._planned_unmade: Counter[_Planned] = Counter()
        for entry in archived:  # no later run makes the rounds that an archived run has planned
            self.accountant.add(entry.event)
            self.charged.append(entry)
            self.counts[entry.event.once] += entry.event.count
        self.archived = tuple(self.charged)
        self._unmade = sum(e.event.count for e in self.archived if e.kind == "planned")

    @property
    def of_this_run(self) -> tuple[Entry, ...]:
        """Charged entries of this ledger, without the archive's."""
        return tuple(self.charged[len(self.archived) :])

    @property
    def effective(self) -> list[Entry]:
        """Charged entries, without planned rounds that were made later."""
        if not any(entry.kind == "planned" for entry in self.of_this_run):
            return self.charged
        # Planned rounds that are still not made are those of the last planned entries.
        unmade, effective = self._planned_unmade.copy(), []
        for entry in reversed(self.of_this_run):
            if entry.kind == "planned":
                remaining = min(entry.event.count, unmade[_planned(entry)])
                unmade[_planned(entry)] -= remaining
                if not remaining:
                    continue
                entry = replace(entry, event=entry.event.once.times(remaining))
            effective.append(entry)
        return [*self.archived, *reversed(effective)]

    def spent(self, run: str | None = None) -> Accountant:
        """Composition of the releases made, without planned rounds that this run did not make.

        Of several runs in one ledger it is the one that lines name ``run``: what another one has
        planned stays charged.
        """
        if not self._planned_unmade.total():
            return self.accountant
        entries = self.effective[len(self.archived) :]
        made_entries = (e for e in entries if e.kind != "planned" or e.run != run)
        return Accountant(entry.event for entry in [*self.archived, *made_entries])

    def without_archive(self) -> History:
        """History of this ledger alone, without the archive's entries."""
        history = History()
        for entry in self.of_this_run:
            history.add_unchecked(entry)
        return history

    @property
    def rows(self) -> int | None:
        """Public number of rows (clients or examples) of the last release, if its line has it."""
        if not self.charged:
            return None
        event, public = self.charged[-1].event, self.charged[-1].public
        client = self.charged[-1].level == "client"
        declared = event.law.population if client else public.get("examples")
        return declared if isinstance(declared, int) else None

    @property
    def releases(self) -> int:
        """Number of releases made, without planned ones."""
        return self.accountant.releases - self._unmade - self._planned_unmade.total()

    def charged_ahead(self, event: Event, run: str | None = None) -> int:
        """Number of releases of ``event`` charged ahead and not made, of one run or of all."""
        return sum(
            count
            for (of_run, _, _, planned), count in self._planned_unmade.items()
            if planned == event.once and run in (None, of_run)
        )

    def last(self, run: str | None = None) -> Entry | None:
        """Last entry of this ledger, or of one run in it; None if there is none."""
        of_this_run = islice(reversed(self.charged), len(self.charged) - len(self.archived))
        return next((e for e in of_this_run if run in (None, e.run)), None)

    def last_round(self, run: str | None = None) -> Entry | None:
        """Last entry of a training round of a run; if the run has none, of any run."""
        rounds = [e for e in reversed(self.charged) if e.of_round]
        of_run = (e for e in rounds if run in (None, e.run))
        return next(of_run, rounds[0] if rounds else None)

    @property
    def ends_torn(self) -> bool:
        """Whether this ledger's last line is torn."""
        return len(self.charged) > len(self.archived) and self.charged[-1].kind == "torn"

    def after(self, entry: Entry) -> Accountant:
        """Composition of everything charged and of ``entry``; the history is unchanged.

        Raises
        ------
        FedsimError
            If its adjacency does not compose with the others', or if it has count 0 or extends a
            plan and no earlier entry charges the rounds that it relies on.
        """
        if not entry.event.count and not self.counts[entry.event.once]:
            raise FedsimError(
                f"round {entry.round} counts 0, and no earlier line charges the plan that it "
                "belongs to."
            )
        before = entry.event.law.continued
        if entry.event.count and before is not None and not self._covers(entry.event, before):
            raise FedsimError(
                f"round {entry.round} extends a plan of {before.rounds} rounds, and no earlier "
                "line charges that plan."
            )
        # The torn entry was charged in this release's place. A composition cannot be undone, so
        # that all other entries are composed again.
        if entry.settles and self.ends_torn:
            accountant = Accountant(charged.event for charged in self.effective[:-1])
        else:
            accountant = self.accountant.copy()
        accountant.add(entry.event.once, entry.event.count - self._covered(entry))
        return accountant

    def _covered(self, entry: Entry) -> int:
        """Invocations of an entry that a planned entry has charged already."""
        if entry.kind == "planned" or entry.attempt:
            return 0
        return min(entry.event.count, self._planned_unmade[_planned(entry)])

    def _covers(self, event: Event, law: Law) -> bool:
        """Whether the law has been charged already, at the noise of ``event``."""
        return any(
            charged_event.law.covers(law)
            and charged_event.noise_multiplier == event.noise_multiplier
            for charged_event, count in self.counts.items()
            if count
        )

    def add(self, entry: Entry) -> None:
        """Count the entry of one more line; it replaces a torn line that it settles."""
        self.accountant = self.after(entry)
        if entry.settles and self.ends_torn:
            torn_event = self.charged.pop().event
            self.counts[torn_event.once] -= torn_event.count
            if not self.counts[torn_event.once]:
                del self.counts[torn_event.once]
        self._note(entry)

    def add_unchecked(self, entry: Entry) -> None:
        """Count one more entry without checking it against earlier ones."""
        self.accountant.add(entry.event.once, entry.event.count - self._covered(entry))
        self._note(entry)

    def _note(self, entry: Entry) -> None:
        """Update everything except the accountant, to which the entry has been added."""
        self.charged.append(entry)
        covered = self._covered(entry)
        self.counts[entry.event.once] += entry.event.count - covered
        if entry.kind == "planned":
            self._planned_unmade[_planned(entry)] += entry.event.count
        elif covered:
            self._planned_unmade[_planned(entry)] -= covered


_Planned = tuple[str | None, str | None, int | None, Event]


def _planned(entry: Entry) -> _Planned:
    """Key by which a release is matched with an earlier entry that charged it as planned."""
    return (entry.run, entry.release, entry.client, entry.event.once)

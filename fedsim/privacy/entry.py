"""Entries: what one line of a ledger says, and what all lines amount to."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.chain import DECODER, sealed_part
from fedsim.privacy.events import Event, dominating_event
from fedsim.privacy.laws.base import Level
from fedsim.privacy.laws.declared import DeclaredLaw

Entropy = Literal["config", "system"]
Placement = Literal["", "server", "client"]
Fact = str | int | float | bool | None
Place = tuple[str | None, str, int | None, int | None]
DECLARED = "declared"
"""How a user's own bound is known to hold, among an entry's public facts."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a ledger: what was released, and nothing about when, where or by what.

    Attributes
    ----------
    kind : "release" or "torn"
        Torn: stands for an unreadable last line, counted at the cost of ``event``.
    round : int or None
    attempt : int
        How often the round was drawn before; each attempt is charged.
    release : str or None
        Digest of all settings that the release follows from (or a number used once, for a
        trainer without a config); None where nothing names it.
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
        Where the noise was drawn; "" where nobody said.
    declared_by_user : bool
        Whether the event is a user's word for what their sampler draws.
    public : mapping of str to str, number, bool or None
        What else was taken as public: a population or number of examples, steps, a
        denominator; ``rows`` says how it is known that each is of one example ("by structure",
        "one at a time: user code"; in older ledgers "probed"),
        ``bound`` that it is a user's word that no row is longer than it says ("declared").
    settles : bool
        Whether this is the release that the torn line just before it began.
    fragment : str
        What was legible of a torn line.
    run : str or None
        Which run's directory a release belongs to, in a ledger that several runs share.
    sum : str or None
        HMAC of the exact sum that was released, under a key beside the ledger. It and ``run`` are
        noted beside the hashed part of a line, so that equal runs have equal heads.
    version : int
        Of the format that it was read from; not written into a line.
    """

    # In this order in a line: a torn one is recognised by as much as stands there.
    kind: Literal["release", "torn"] = "release"
    round: int | None = None
    attempt: int = 0
    release: str | None = None
    client: int | None = None
    fingerprint: str | None = None
    level: Level = "client"
    entropy: Entropy = "system"
    event: Event
    mechanism: str = ""
    clip_norm: float | None = None
    placement: Placement = ""
    declared_by_user: bool = False
    public: Mapping[str, Fact] = field(default_factory=dict)
    settles: bool = False
    fragment: str = ""
    run: str | None = None
    sum: str | None = None
    version: int = field(default=2, compare=False)

    def __post_init__(self) -> None:
        for name, (holds, allowed) in _FIELDS.items():
            value = getattr(self, name)
            if not holds(value):
                raise FedsimError(
                    f"{name.replace('_', '-')} is {value!r}; in a ledger it must be {allowed}."
                )
        object.__setattr__(self, "public", dict(sorted(self.public.items())))
        # What only data say of a law is its author's word, whoever writes the line.
        outside = isinstance(self.event.law, DeclaredLaw)
        object.__setattr__(self, "declared_by_user", self.declared_by_user or outside)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe mapping with kebab-case keys, in the order of the fields."""
        data = {name: getattr(self, name) for name in _WRITTEN}
        data["event"] = self.event.to_dict()
        if self.clip_norm is not None and math.isinf(self.clip_norm):
            data["clip_norm"] = "inf"
        return {name.replace("_", "-"): value for name, value in data.items()}

    @property
    def noted(self) -> dict[str, str]:
        """What is written beside the hashed part."""
        values = {name: getattr(self, name) for name in _NOTED}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], noted: Mapping[str, Any] | None = None) -> Entry:
        """Inverse of `to_dict` and `noted`.

        Raises
        ------
        FedsimError
            If a field is missing, unknown, of the wrong type or out of range.
        """
        fields = {name.replace("-", "_"): value for name, value in data.items()}
        if set(fields) != set(_WRITTEN):
            strange = sorted(set(fields) ^ set(_WRITTEN))
            raise FedsimError(f"its fields are not an entry's: {', '.join(strange)}.")
        if not isinstance(fields["event"], Mapping):
            raise FedsimError(f"event is {fields['event']!r}; it must be a mapping.")
        fields["event"] = Event.from_dict(fields["event"])
        if fields["clip_norm"] == "inf":
            fields["clip_norm"] = math.inf
        fields.update((name, (noted or {}).get(name)) for name in _NOTED)
        return cls(**fields)

    @property
    def place(self) -> Place | None:
        """Where in which run it was made; None where nobody said which release it is."""
        if self.release is None or self.kind != "release":
            return None
        return (self.run, self.release, self.round, self.client)

    @property
    def repeatable(self) -> bool:
        """Whether the same release can be made again: its noise follows from the config.

        A client's release is known by its keyed fingerprint.
        """
        known = self.level == "client" or self.fingerprint is not None
        return self.entropy == "config" and self.place is not None and known

    def repeats(self, other: Entry) -> bool:
        """Whether this is the very release of an earlier line of the same `place`."""
        same = (self.attempt, self.event) == (other.attempt, other.event)
        return self.repeatable and other.repeatable and same and not self.differs(other)

    def differs(self, other: Entry) -> bool:
        """Whether keyed hashes show that it is of other data than a line of the same `place`."""
        return (self.sum, self.fingerprint) != (other.sum, other.fingerprint)


def torn_entry(torn: bytes, known: Iterable[Event]) -> Entry:
    """An entry at least as costly as whatever a torn line was to say.

    Parameters
    ----------
    rest : bytes
        What is there of the line.
    known : iterable of Event
        Everything recorded or planned.
    """
    fragment = torn.decode("ascii", "backslashreplace")
    legible = _event_in(fragment)
    event = dominating_event([*known, *([legible] if legible is not None else [])])
    # Of a line without any event known, nothing can be said.
    unknown = Event(noise_multiplier=0.0, guarantee=False)
    return Entry(kind="torn", event=event or unknown, fragment=fragment)


def _event_in(fragment: str) -> Event | None:
    """The event of a torn line, if all of it is legible."""
    _, marker, tail = fragment.partition('"event":')
    if not marker:
        return None
    try:
        data, _ = DECODER.raw_decode(tail)
        return Event.from_dict(data)
    except (FedsimError, ValueError, TypeError, RecursionError):
        return None


def _whole(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _text(value: object) -> bool:
    return isinstance(value, str)


def _optional(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _facts(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str)
        and isinstance(fact, str | int | float | bool | None)
        and not (isinstance(fact, float) and not math.isfinite(fact))
        for name, fact in value.items()
    )


_BOOL = (lambda value: isinstance(value, bool), "true or false")
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "kind": (lambda value: value in ("release", "torn"), "'release' or 'torn'"),
    "round": (_optional(_whole), "a whole number, 0 or more, or null"),
    "attempt": (_whole, "a whole number, 0 or more"),
    "release": (_optional(_text), "text or null"),
    "client": (_optional(_whole), "a whole number, 0 or more, or null"),
    "fingerprint": (_optional(_text), "text or null"),
    "level": (lambda value: value in ("client", "example"), "'client' or 'example'"),
    "entropy": (lambda value: value in ("config", "system"), "'config' or 'system'"),
    "mechanism": (_text, "text"),
    "clip_norm": (_optional(_number), "a number, 0 or more, or null"),
    "placement": (lambda value: value in ("", "server", "client"), "'', 'server' or 'client'"),
    "declared_by_user": _BOOL,
    "public": (_facts, "a table of text, finite numbers, true or false"),
    "settles": _BOOL,
    "fragment": (_text, "text"),
    "run": (_optional(_text), "text or null"),
    "sum": (_optional(_text), "text or null"),
}
_NOTED = ("run", "sum")
_WRITTEN = tuple(name for name in Entry.__dataclass_fields__ if name not in (*_NOTED, "version"))


class History:
    """Entries so far, and what they cost together.

    Parameters
    ----------
    before : iterable of Entry
        Charged earlier, elsewhere: an archive.
    """

    def __init__(self, before: Iterable[Entry] = ()) -> None:
        self.entries: list[Entry] = []
        """Of this ledger, all of them."""
        self.charged: list[Entry] = []
        """The archive's and all of these but torn ones whose release was recorded after all."""
        self.accountant = Accountant()
        self.counts: Counter[Event] = Counter()
        """How often each event was charged, a count of several as several."""
        self._made: dict[Place, list[Entry]] = defaultdict(list)
        self._untorn: Accountant | None = None
        for entry in before:
            self.accountant = self.after(entry)
            self._charge(entry)
        self.before = tuple(self.charged)
        """Those of the charged ones that are the archive's."""

    @property
    def of_this_run(self) -> tuple[Entry, ...]:
        """What would be charged without the archive."""
        kept: list[Entry] = []
        for entry in self.entries:
            if entry.settles and kept and kept[-1].kind == "torn":
                kept.pop()
            kept.append(entry)
        return tuple(kept)

    def after(self, entry: Entry) -> Accountant:
        """The accountant once ``entry`` is counted; nobody else's.

        Raises
        ------
        FedsimError
            If its adjacency does not compose with what is here.
        """
        accountant = self._untorn if entry.settles and self._untorn else self.accountant
        accountant = accountant.copy()
        accountant.add(entry.event)
        return accountant

    def attempts(self, entry: Entry) -> Sequence[Entry]:
        """Lines of this ledger, not of its archive, about the same round of the same run."""
        return self._made.get(entry.place, ()) if entry.place is not None else ()

    def take(self, entry: Entry) -> None:
        """Count one more line."""
        accountant = self.after(entry)
        self.entries.append(entry)
        if entry.place is not None:
            self._made[entry.place].append(entry)
        if entry.settles and self._untorn is not None:
            self._count(self.charged.pop().event, -1)
        self._untorn = self.accountant if entry.kind == "torn" else None
        self.accountant = accountant
        self._charge(entry)

    def began(self, data: Mapping[str, Any], head: str, *, upto: str = "") -> bool:
        """Whether the torn line that stands last is the beginning of one that says this.

        Parameters
        ----------
        data : mapping
        head : str
            Hash of the line before the torn one.
        upto : str
            Compare what stands before this; by default, all that the hash covers.
        """
        if self._untorn is None:
            return False
        text, _ = sealed_part(data, head)
        text = text[: text.index(upto)] if upto else text
        fragment = self.entries[-1].fragment
        return text.startswith(fragment) or fragment.startswith(text)

    def _charge(self, entry: Entry) -> None:
        self.charged.append(entry)
        self._count(entry.event, 1)

    def _count(self, event: Event, sign: int) -> None:
        self.counts[event.once] += sign * event.count
        if not self.counts[event.once]:
            del self.counts[event.once]

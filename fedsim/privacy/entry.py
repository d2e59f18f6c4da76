"""Entries, what a ledger's lines say; and the history of one owner that they add up to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Level
from fedsim.privacy.laws.declared import DeclaredLaw
from fedsim.privacy.records import read_record, to_json
from fedsim.settings import Ge, check_settings

Kind = Literal["release", "evaluation"]
Entropy = Literal["config", "system"]
Fact = str | int | float | bool | None
DECLARED = "declared"
"""Value of a public fact of an entry: the user declares this part of the plan."""
WEIGHTS = "weights"
"""Public fact of an entry: the clients' declared weights in the mean, if they have any."""
SIMULATED_COHORT = "simulated-cohort"
"""Public fact of an entry: size of the larger cohort whose cost its event is."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What was released in a round, and what it cost; without time, host or engine.

    Attributes
    ----------
    kind : "release" or "evaluation"
        The noisy sum of a round, or noisy metrics of clients.
    round : int or None
    through : int or None
        Last round that this entry pays for, if it pays for rounds after its own: a whole plan, or
        the rest of one.
    clients : tuple of int or None
        At example level, the clients that each released this, sorted.
    level : "client" or "example"
        What a row of the released sum is.
    entropy : "config" or "system"
        Source of noise and samples: the config's seed, or the operating system.
    event : Event
        What is charged, to each of the clients at example level.
    mechanism : str
    clip_norm : float or None
    placement : "", "server" or "client"
        Where the noise was drawn; "" if unknown.
    declared_by_user : bool
        Whether only the user declares that the event is true of the samples and the noise.
    public : mapping of str to str, number, bool or None
        Further public facts: a population or number of examples, steps, a denominator; ``rows``,
        why each row depends on one example alone ("by structure", "one at a time: user code"); and
        ``bound``, ``sampler`` or ``noise``, if it is "declared".
    run : str or None
        Random id of the run. It is outside the hashed part of a line, so that equal runs have equal
        heads.

    Raises
    ------
    FedsimError
        If a value is of the wrong type or out of range.
    """

    kind: Kind = "release"
    round: Annotated[int | None, Ge(0)] = None
    through: Annotated[int | None, Ge(0)] = None
    clients: tuple[int, ...] | None = None
    level: Level = "client"
    entropy: Entropy = "system"
    event: Event
    mechanism: str = ""
    clip_norm: Annotated[float | None, Ge(0)] = None
    placement: Literal["", "server", "client"] = ""
    declared_by_user: bool = False
    public: Mapping[str, Fact] = field(default_factory=dict)
    run: str | None = None

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

    @property
    def noised_by_clients(self) -> bool:
        """Whether rows had noise before they left their clients."""
        return self.placement == "client"

    @property
    def summed_shares(self) -> int:
        """Fewest rows of a sum that the server sees under masks; 0 if it sees single rows."""
        return int(self.public.get("secagg-threshold") or 0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe mapping with kebab-case keys, in the order of the fields; without the run."""
        return to_json(self, without=("run",))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], run: str | None = None) -> Entry:
        """Inverse of `to_dict`.

        Raises
        ------
        FedsimError
            If a field is missing, unknown, of the wrong type or out of range.
        """
        return read_record(
            cls, {**data, "event": Event.from_dict(data.get("event"))}, "an entry", run=run
        )

    @property
    def owners(self) -> tuple[int | None, ...]:
        """Who is charged: the clients at example level; None stands for all clients together."""
        return (None,) if self.clients is None else self.clients


def _is_fact(item: tuple[object, object]) -> bool:
    name, fact = item
    finite = not isinstance(fact, float) or math.isfinite(fact)
    return isinstance(name, str) and isinstance(fact, str | int | float | bool | None) and finite


class History:
    """All that is charged to one owner, and its composition.

    Attributes
    ----------
    counts : Counter of Event
        Invocations of each event, by the event with count 1, in the order of their first line.
    last : Entry or None
        The entry added last.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.counts: Counter[Event] = Counter()
        self.last: Entry | None = None
        self._accountant: Accountant | None = Accountant()
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Charge one more entry."""
        event, self.last = entry.event, entry
        if not event.count:
            return
        is_new = event.single not in self.counts
        self.counts[event.single] += event.count
        if is_new and self._accountant is not None:
            self._accountant.add(event)
        else:
            # Composed again from the counts, so that a ledger that is read has the same bits.
            self._accountant = None

    @property
    def accountant(self) -> Accountant:
        """Composition of everything charged."""
        if self._accountant is None:
            self._accountant = Accountant()
            for event, count in self.counts.items():
                self._accountant.add(event, count)
        return self._accountant

    def accountant_with(self, *entries: Entry) -> Accountant:
        """Composition of everything charged and of these entries; the history is unchanged.

        Raises
        ------
        FedsimError
            If an adjacency does not compose with the others', or if an entry counts 0 and no
            earlier one charges the plan that it belongs to.
        """
        total = History()
        total.counts, total._accountant = self.counts.copy(), None
        for entry in entries:
            if not entry.event.count and not total.counts[entry.event.single]:
                raise FedsimError(
                    f"round {entry.round} counts 0, and no earlier line charges the plan that it "
                    "belongs to."
                )
            total.add(entry)
        return total.accountant

    @property
    def rows(self) -> int | None:
        """Public number of rows (clients or examples) of the last release, if its line has it."""
        if self.last is None:
            return None
        client = self.last.level == "client"
        law, public = self.last.event.law, self.last.public
        declared = law.population if client else public.get("examples")
        return declared if isinstance(declared, int) else None

"""What a ledger's lines amount to: every line is charged, a torn one unless it was completed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fedsim.privacy.accountant import Accountant
from fedsim.privacy.chain import sealed_part
from fedsim.privacy.entry import Entry, Place
from fedsim.privacy.events import Event

__all__ = ["History"]


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

    def began(self, entry: Entry, head: str, *, upto: str = "") -> bool:
        """Whether the torn line that stands last is the beginning of this entry's.

        Parameters
        ----------
        head : str
            Hash of the line before the torn one.
        upto : str
            Compare what stands before this; by default, all that the hash covers.
        """
        if self._untorn is None:
            return False
        text, _ = sealed_part(entry.to_dict(), head)
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

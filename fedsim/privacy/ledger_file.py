"""A ledger's file and its lines in memory: read, extended by several processes, repaired.

Each process has the lines it has read in memory. Before it adds one it locks the file and reads
what others have added since, so that the hash chain, the budget check and the new line are of one
state. A torn last line, left by a crash, is replaced in the file by a valid line of kind "torn".
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.privacy import durable
from fedsim.privacy.claims import Budget
from fedsim.privacy.durable import archive, archived
from fedsim.privacy.entry import Entry, History, ReleaseId
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Level, check_level
from fedsim.privacy.laws.declared import NAME, DeclaredLaw
from fedsim.privacy.ledger_lines import (
    GENESIS,
    End,
    Header,
    is_old,
    old_entries,
    parsed_line,
    sealed_line,
    sealed_part,
    torn_entry,
)


class LedgerFile:
    """A ledger's lines, in a file or only in memory.

    Parameters
    ----------
    path : path or None
        The file; None: in memory only.
    planned : Event or None
        A torn line is charged at no less than this.
    read_only : bool
        Whether nothing is written, not even a repair.
    with_archive : bool
        Whether the archived ledgers of this path count.

    Attributes
    ----------
    header : Header or None
        None until something is recorded.
    lines : list of bytes
        All lines, the header's included, without newlines.
    heads : list of str
        Hash of each line: the earlier heads of a ledger that was extended are among them.
    ends_incomplete : bool
        Whether the file, opened read-only, ends in a torn line. The last of `lines` and `heads`
        then belongs to the line that replaces it in memory; a repair may write another line.
    history : History
        Charged entries of this ledger and of the archive, and their cost.

    Raises
    ------
    FedsimError
        If the file is no ledger, or was changed after it was written.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        planned: Event | None = None,
        read_only: bool = False,
        with_archive: bool = True,
    ) -> None:
        self.path = path
        self.read_only = read_only
        self._planned = [] if planned is None else [planned]
        self._with_archive = with_archive
        self._clear()
        if path is not None and path.is_dir():
            raise FedsimError(
                f"the ledger's path, {path}, is a directory; it must be a file, such as "
                f"{path / 'ledger.jsonl'}."
            )
        if path is not None and path.exists():
            with durable.locked(path, write=not read_only) as file:
                self._load(file.read())

    def _clear(self) -> None:
        """Forget all lines; start again from the archive's history."""
        self.header: Header | None = None
        self.lines: list[bytes] = []
        self.heads: list[str] = []
        self.history = self._archived()
        self._entries: list[Entry] = []  # of the lines, torn ones included
        self._by_release: dict[ReleaseId, list[Entry]] = defaultdict(list)
        self._laws: dict[str, Any] = {}  # JSON of users' laws in earlier lines, by digest
        self._size = 0  # bytes of the file read so far
        self._is_old = False
        self.ends_incomplete = False

    @property
    def head(self) -> str:
        """Hash of the last line, which covers the whole ledger."""
        return self.heads[-1] if self.heads else GENESIS

    @property
    def end(self) -> End:
        """Hash of the last line, and number of lines."""
        return End(self.head, len(self.heads))

    def continues(self, end: End) -> bool:
        """Whether its first lines are those of a ledger that had this end."""
        return not end.lines or self.heads[end.lines - 1 : end.lines] == [end.head]

    @property
    def level(self) -> Level:
        """What a row is; "client" until something is recorded."""
        if self.header is not None:
            return self.header.level
        return self.history.charged[-1].level if self.history.charged else "client"

    def attempts(self, entry: Entry) -> Sequence[Entry]:
        """Entries of this ledger, without the archive, for the same round of the same run."""
        return self._by_release.get(entry.release_id, ()) if entry.release_id is not None else ()

    def has_fragment_of(self, entry: Entry, *, upto: str = "") -> bool:
        """Whether the last line is torn and is the beginning of this entry's line.

        Parameters
        ----------
        entry : Entry
        upto : str
            Compare only the text before this one; by default all that the hash covers.
        """
        if not (self.history.ends_torn and entry.repeatable and len(self.heads) > 1):
            return False
        # The line would have followed the one before the torn line: its hash is in the text.
        text, _ = sealed_part(self._data(entry), self.heads[-2])
        text = text[: text.index(upto)] if upto else text
        fragment = self._entries[-1].fragment
        return text.startswith(fragment) or fragment.startswith(text)

    def refresh(self) -> None:
        """Read the lines that other processes have added since."""
        if self.path is None or not self.path.exists():
            return
        if self.path.stat().st_size != self._size or self.ends_incomplete:
            with durable.locked(self.path, write=not self.read_only) as file:
                self._catch_up(file)

    def write(self, entry: Entry, budget: Budget | None = None) -> bool:
        """Add a line durably; False if the same release is in the ledger already.

        The budget is checked and the line written under one lock.

        Raises
        ------
        BudgetSpentError
            If the budget does not allow it.
        FedsimError
            If the ledger is read-only, if the entry does not compose with it, or if it repeats a
            release with another sum.
        """
        if self.read_only:
            raise FedsimError(f"ledger {self.path} was opened for reading only.")
        check_level(entry.level, entry.event.adjacency)
        if self.path is None:
            return self._add(entry, None, budget)
        # Other processes may create, repair or archive the file at any time. Whatever happens
        # between a look at it and the lock, the attempt starts again from the file's new state.
        while True:
            if not self.path.exists():
                if self.header is not None:
                    raise self._removed()
                if self._create(entry, budget):
                    return True
                continue  # another process was faster
            try:
                with durable.locked(self.path) as file:
                    if self._catch_up(file):
                        continue
                    if not self._is_old:
                        return self._add(entry, file, budget)
                    # A ledger of an old format is never extended; archived, it stays charged.
                    archive(self.path)
            except FileNotFoundError:
                continue  # another process has archived it
            self._clear()

    def _create(self, entry: Entry, budget: Budget | None) -> bool:
        """Create the file with its first release; False if another process was faster."""
        assert self.path is not None
        # Another process may have archived ledgers since: read the archive again. If it has
        # become shorter, spent epsilon has been deleted.
        charged_count = len(self.history.charged)
        self._clear()
        if len(self.history.charged) < charged_count:
            raise self._removed()
        self._check(entry, budget)
        header, first = Header(level=entry.level, client=entry.client).sealed()
        line, head = sealed_line(self._data(entry), first, _notes(entry))
        if not durable.create(self.path, header + line):
            return False
        self._accept_line(header[:-1])
        self._accept(entry, line, head)
        return True

    def _add(self, entry: Entry, file: BinaryIO | None, budget: Budget | None) -> bool:
        """`write` with the file locked and read to its end (or None, in memory)."""
        attempts = self.attempts(entry)
        if any(entry.repeats(line) for line in attempts):
            return False
        if attempts and entry.entropy == "system":
            entry = replace(entry, attempt=len(attempts))
        elif any(_shares_noise(entry, line) for line in attempts):
            raise self._other_release(entry)
        if self.has_fragment_of(entry):
            entry = replace(entry, settles=True)
        self._check(entry, budget)
        if self.header is None:
            self._accept_line(Header(level=entry.level, client=entry.client).sealed()[0][:-1])
        line, head = sealed_line(self._data(entry), self.head, _notes(entry))
        if file is not None:
            durable.append(file, line)
        self._accept(entry, line, head)
        return True

    def _check(self, entry: Entry, budget: Budget | None) -> None:
        """Refuse an entry that does not compose with the ledger, or exceeds the budget."""
        if self.history.charged and entry.level != self.level:
            raise FedsimError(
                f"level is {entry.level!r}; ledger {self.path or 'in memory'} is about "
                f"{self.level} level, and guarantees of different levels do not add up."
            )
        total = self.history.after(entry)
        if budget is not None and total.epsilon(budget.delta) > budget.epsilon:
            raise BudgetSpentError(f"{budget.message(entry, self.path)}.")

    def _other_release(self, entry: Entry) -> FedsimError:
        of_client = "" if entry.client is None else f" of client {entry.client}"
        return FedsimError(
            f"round {entry.round}{of_client} was recorded in ledger {self.path or 'in memory'} for "
            "another sum: data, code, path, kernel or fedsim's version have changed since, or the "
            "key beside the ledger (fingerprint.key). Its noise follows from the seed, and two "
            "sums with the same noise would show their difference; restore what the run began "
            "with, or start a new run with another seed and another --out."
        )

    def _archived(self) -> History:
        """History of the archived ledgers of this path."""
        if self.path is None or not self._with_archive:
            return History()
        before: list[Entry] = []
        for path in archived(self.path):
            before += LedgerFile(path, read_only=True, with_archive=False).history.effective
        try:
            return History(before)
        except FedsimError as error:
            raise FedsimError(
                f"the ledgers archived beside {self.path} count, and cannot be composed: {error}"
            ) from None

    def _catch_up(self, file: BinaryIO) -> bool:
        """Read what is new in the file; True if it was repaired, and so replaced by another file.

        The lock is then on the old file, and the caller must lock again.
        """
        # A torn line that was only read may have been repaired, or completed, since.
        if self.header is None or self.ends_incomplete:
            self._clear()
        size = os.fstat(file.fileno()).st_size
        if size < self._size:
            raise FedsimError(f"ledger {self.path} was cut off while it was in use.")
        if size == self._size > 0:
            return False
        file.seek(self._size)
        return self._load(file.read())

    def _load(self, data: bytes) -> bool:
        """Take further bytes of the file; True if its last line was torn, and was repaired."""
        if self.header is None and is_old(data):
            try:
                entries = old_entries(data, self._planned)
            except FedsimError as error:
                raise self._changed(str(error)) from None
            for entry in entries:
                self._add_to_history(entry)
            self._size, self._is_old = len(data), True
            return False
        *lines, tail = data.split(b"\n")
        for line in lines:
            self._accept_line(line)
        if self.header is None:
            raise FedsimError(
                f"{self._name} is {'cut off' if tail else 'empty'}, or is not a ledger; fedsim "
                "never writes one so: restore it."
            )
        if not tail:
            return False
        events = {charged.event for charged in self.history.charged}
        # Notes are dropped: they have a time, which a repetition of the release cannot match.
        torn_line = torn_entry(tail.partition(b',"noted":')[0], [*events, *self._planned])
        entry = replace(torn_line, level=self.level, version=self.header.version)
        self._accept(entry, *sealed_line(self._data(entry), self.head))
        self.ends_incomplete = self.read_only
        if self.path is None or self.read_only:
            return False
        durable.replace(self.path, b"".join(line + b"\n" for line in self.lines))
        return True

    def _accept_line(self, line: bytes) -> None:
        if self.header is not None:
            entry, head = self._parsed(line, self.header.version)
            self._accept(entry, line + b"\n", head)
            return
        try:
            self.header, head = Header.of(line)
        except FedsimError as error:
            raise FedsimError(f"{self._name}: {error}") from None
        self._append_line(line + b"\n", head)

    def _parsed(self, line: bytes, version: int) -> tuple[Entry, str]:
        try:
            data, noted, head = parsed_line(line, self.head)
            entry = Entry.from_dict(self._with_law(data), noted, version=version)
            if entry.level != self.level and entry.kind != "torn":
                raise FedsimError(f"level is {entry.level!r}, in a ledger of {self.level} level.")
            return entry, head
        except FedsimError as error:
            raise self._changed(f"line {len(self.lines) + 1}: {error}") from None

    def _data(self, entry: Entry) -> dict[str, Any]:
        """The entry's JSON; a user's law that an earlier line has in full is given by digest."""
        data, law = entry.to_dict(), entry.event.law
        if isinstance(law, DeclaredLaw) and law.digest in self._laws:
            data["event"]["law"] = {"name": NAME, "as": law.digest}
        return data

    def _with_law(self, data: dict[str, Any]) -> dict[str, Any]:
        """Inverse of `_data`."""
        event = data.get("event")
        law = event.get("law") if isinstance(event, dict) else None
        if not isinstance(law, dict) or "as" not in law:
            return data
        if law["as"] not in self._laws:
            raise FedsimError("its law is in no earlier line.")
        return {**data, "event": {**data["event"], "law": self._laws[law["as"]]}}

    def _accept(self, entry: Entry, line: bytes, head: str) -> None:
        law = entry.event.law
        # Later lines cannot refer to the law of a torn line, which was never written in full.
        if isinstance(law, DeclaredLaw) and entry.kind != "torn":
            self._laws[law.digest] = law.to_dict()
        self._add_to_history(entry)
        self._append_line(line, head)

    def _add_to_history(self, entry: Entry) -> None:
        self.history.add(entry)
        self._entries.append(entry)
        if entry.release_id is not None:
            self._by_release[entry.release_id].append(entry)

    def _append_line(self, line: bytes, head: str) -> None:
        self.lines.append(line[:-1])
        self.heads.append(head)
        self._size += len(line)

    @property
    def _name(self) -> str:
        return f"ledger {self.path}" if self.path is not None else "the ledger's state"

    def _removed(self) -> FedsimError:
        return FedsimError(f"ledger {self.path} was removed while it was in use.")

    def _changed(self, reason: str) -> FedsimError:
        return FedsimError(
            f"{self._name}, {reason} A ledger that was changed after it was written proves nothing."
        )


def _shares_noise(entry: Entry, line: Entry) -> bool:
    """Whether it would release a different sum with the same noise as an earlier line."""
    is_identified = any(code is not None for code in (entry.run, entry.sum, line.sum))
    return entry.repeatable and line.repeatable and is_identified and entry.differs(line)


def _notes(entry: Entry) -> dict[str, str]:
    """Notes outside the hash: for the operator (time, host), and for a resumed run."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"time": time, "host": socket.gethostname(), **entry.noted}

"""Lines of a ledger file: JSON, one for each entry, chained by hashes.

A line is ``{"entry": {...}, "hash": "...", "noted": {...}}``. The hash covers the bytes of the
entry, which contain the hash of the line before. The notes (time, host, the keyed hashes that
only a resumed run needs) are covered by no hash, so that equal runs have equal heads.

A chain proves that no line was damaged, lost or swapped by accident. It contains no secret:
anyone who can write the file can write a forged chain, or cut off its end. To detect that, compare
its head with a copy kept elsewhere (`fedsim privacy RUN --verify`), or sign it.

Ledgers of format 1 are read and counted, but never extended. Their lines were flat, with the hash
at the end, a time inside the hash and no header. At example level they claimed add-remove; the
true guarantee was zero-out with every client's number of examples public, and they are read so.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from fedsim.errors import FedsimError
from fedsim.privacy.entry import VERSION, Entry
from fedsim.privacy.events import Event, dominating_event
from fedsim.privacy.laws.base import Level
from fedsim.privacy.records import read_record, to_json

GENESIS = "0" * 64
"""Previous hash of the first line."""
HEADER = b'{"entry":{"kind":"ledger","version":'
"""First bytes of a ledger file."""
_LINE_START = '{"entry":'


@dataclass(frozen=True)
class End:
    """End of a ledger: hash of the last line, and number of lines."""

    head: str
    lines: int


def sealed_line(
    entry: Mapping[str, Any], previous: str, noted: Mapping[str, Any] | None = None
) -> tuple[bytes, str]:
    """One line, newline included, and its hash."""
    hashed, digest = sealed_part(entry, previous)
    unhashed = json.dumps(dict(noted or {}), separators=(",", ":"), allow_nan=False)
    return f'{hashed},"noted":{unhashed}}}\n'.encode(), digest


def sealed_part(entry: Mapping[str, Any], previous: str) -> tuple[str, str]:
    """A line up to and including its hash, and the hash."""
    data = {**entry, "previous": previous}
    # Numbers may be NumPy's, which json cannot write.
    number = operator.methodcaller("item")
    body = json.dumps(data, separators=(",", ":"), allow_nan=False, default=number)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{_LINE_START}{body},"hash":"{digest}"', digest


def parsed_line(line: bytes, previous: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Entry, notes and hash of a line, given the hash of the line before.

    Raises
    ------
    FedsimError
        If it is no line that `sealed_line` wrote after the one of hash ``previous``.
    """
    try:
        text = line.decode("ascii")
        if not text.startswith(_LINE_START):
            raise ValueError(text)
        entry, end = _DECODER.raw_decode(text, len(_LINE_START))
    except (ValueError, RecursionError):
        raise FedsimError("it is not a ledger's line.") from None
    # The hash is of the bytes in the file, not of the parsed entry written again: a line that was
    # only respelled is detected, and another version's spelling of numbers is not an error.
    digest = hashlib.sha256(text[len(_LINE_START) : end].encode()).hexdigest()
    seal = f',"hash":"{digest}"'
    if not isinstance(entry, dict) or not text.startswith(seal, end):
        raise FedsimError("its hash does not match its content.")
    unhashed = text[end + len(seal) :]
    noted = _parsed(f"{{{unhashed[1:]}") if unhashed.startswith(',"noted":') else None
    if not isinstance(noted, dict) or not isinstance(noted["noted"], dict):
        raise FedsimError("the notes beside its entry cannot be read.")
    if entry.pop("previous", None) != previous:
        raise FedsimError("it does not follow the line before it.")
    return entry, noted["noted"], digest


def _parsed(text: str | bytes) -> Any:
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError):
        raise FedsimError("it is not a ledger's line.") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of a ledger")


# Python's json would accept NaN and infinities, which JSON does not have.
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True, kw_only=True)
class Header:
    """First line of a ledger: what all its lines have in common.

    Attributes
    ----------
    version : int
        Format of the ledger.
    level : "client" or "example"
        What a row of its releases is.
    client : int or None
        The ledger's client, at example level.
    """

    version: int = VERSION
    level: Level
    client: int | None = None

    def sealed(self) -> tuple[bytes, str]:
        """The header's line, newline included, and its hash."""
        return sealed_line({"kind": "ledger", **to_json(self)}, GENESIS)

    @classmethod
    def of(cls, line: bytes) -> tuple[Header, str]:
        """Parse the first line: the header, and its hash.

        Raises
        ------
        FedsimError
            If it is no header, or of a format that this fedsim does not know.
        """
        if not line.startswith(HEADER):
            raise FedsimError(
                "it is not a ledger; a ledger is a file that fedsim wrote, such as "
                "runs/NAME/ledger.jsonl."
            )
        data, _, head = parsed_line(line, GENESIS)
        version = data.get("version")
        if version not in (2, VERSION):
            raise FedsimError(
                f"its format is {version}; this fedsim reads formats 1 to {VERSION}: read it "
                "with the fedsim that wrote it."
            )
        del data["kind"]
        return read_record(cls, data, "its header"), head


def torn_entry(torn: bytes, known: Iterable[Event]) -> Entry:
    """Entry for a torn line, at least as costly as any that may have been being written.

    Parameters
    ----------
    torn : bytes
        The part of the line that was written.
    known : iterable of Event
        All events recorded or planned.
    """
    fragment = torn.decode("ascii", "backslashreplace")
    events = list(known)
    _, _, tail = fragment.partition('"event":')
    with suppress(FedsimError, ValueError, TypeError, RecursionError):  # the event may be cut short
        events.append(Event.from_dict(_DECODER.raw_decode(tail)[0]))
    # If no event is known at all, the release may have had no noise.
    event = dominating_event(events) or Event(noise_multiplier=0.0, guarantee=False)
    return Entry(kind="torn", event=event, fragment=fragment)


# Format 1.

_OLD_BEGINS = (b'{"kind":"release",', b'{"kind":"torn",')
_OLD_SEAL = len(',"hash":""}') + 64


def is_old(data: bytes) -> bool:
    """Whether a file is a ledger of format 1, perhaps cut off in its first bytes."""
    return any(data.startswith(begin) for begin in _OLD_BEGINS) or (
        len(data) >= 8 and any(begin.startswith(data) for begin in _OLD_BEGINS)
    )


def old_entries(data: bytes, planned: Iterable[Event] = ()) -> list[Entry]:
    """Charged entries of a ledger of format 1.

    A torn last line is charged at no less than any other line or planned event.

    Raises
    ------
    FedsimError
        If a line is damaged or does not follow the one before it.
    """
    *lines, tail = data.split(b"\n")
    entries: list[Entry] = []
    head = GENESIS
    for number, line in enumerate(lines, start=1):
        try:
            entry, head = _old_entry(line, head)
        except FedsimError as error:
            raise FedsimError(f"line {number}: {error}") from None
        if entry.settles and entries and entries[-1].kind == "torn":
            entries.pop()
        entries.append(replace(entry, settles=False))
    if tail:
        try:
            entries.append(_old_entry(tail, head)[0])
        except FedsimError:
            events = [*{entry.event for entry in entries}, *planned]
            entries.append(replace(torn_entry(tail, events), version=1))
    return entries


def _old_entry(line: bytes, previous: str) -> tuple[Entry, str]:
    """Entry and hash of a line of format 1, in today's form."""
    body, seal = line[:-_OLD_SEAL] + b"}", line[-_OLD_SEAL:]
    digest = hashlib.sha256(body).hexdigest()
    if seal != f',"hash":"{digest}"}}'.encode():
        raise FedsimError("its hash does not match its content.")
    data = _parsed(body)
    if not isinstance(data, dict) or data.pop("previous", None) != previous:
        raise FedsimError("it does not follow the line before it.")
    # At example level "draws" was an unkeyed digest of protected data. It is dropped, so that no
    # release of format 1 is recognised as a repetition of another.
    for name in ("draws", "time"):
        data.pop(name, None)
    event = Event.from_dict(data.get("event"))
    if data.get("level") == "example" and event.adjacency == "add-remove":
        event = replace(event, law=replace(event.law, adjacency="zero-out"))
    newer = Entry(event=event).to_dict()
    return Entry.from_dict({**newer, **data, "event": newer["event"]}, version=1), digest

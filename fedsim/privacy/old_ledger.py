"""Ledgers of format 1, which are read, counted and never written to.

Their lines were flat, sealed at the end, with a time inside the hash and no header. At
example level they claimed add-remove; what held was zero-out with every client's number of
examples public, and so they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fedsim.errors import FedsimError
from fedsim.privacy.chain import GENESIS, parsed, split
from fedsim.privacy.entry import Entry, torn_entry
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Level

_BEGINS = (b'{"kind":"release",', b'{"kind":"torn",')
_SEAL = len(',"hash":""}') + 64
_FIELDS = {"kind", "round", "event", "level", "entropy", "mechanism", "clip-norm", "draws"}
_FIELDS |= {"client", "time", "settles", "fragment"}


def is_old(data: bytes) -> bool:
    """Whether a file is, or begins as, a ledger of format 1."""
    return any(data.startswith(begin) for begin in _BEGINS) or (
        len(data) >= 8 and any(begin.startswith(data) for begin in _BEGINS)
    )


def old_entries(data: bytes, planned: Iterable[Event] = ()) -> list[Entry]:
    """Its charged entries; a torn last line costs no less than any other, or than is planned.

    Raises
    ------
    FedsimError
        If a line is damaged or does not follow the one before it.
    """
    lines, tail = split(data)
    entries: list[Entry] = []
    head = GENESIS
    for number, line in enumerate(lines, start=1):
        try:
            entry, head = _opened(line, head)
        except FedsimError as error:
            raise FedsimError(f"line {number}: {error}") from None
        if entry.settles and entries and entries[-1].kind == "torn":
            entries.pop()
        entries.append(replace(entry, settles=False))
    if tail:
        try:
            entries.append(_opened(tail, head)[0])
        except FedsimError:
            known = [*{entry.event for entry in entries}, *planned]
            entries.append(replace(torn_entry(tail, known), version=1))
    return entries


def _opened(line: bytes, previous: str) -> tuple[Entry, str]:
    body, seal = line[:-_SEAL] + b"}", line[-_SEAL:]
    digest = hashlib.sha256(body).hexdigest()
    if seal != f',"hash":"{digest}"}}'.encode():
        raise FedsimError("its hash does not match its content.")
    data = parsed(body)
    if not isinstance(data, dict) or data.pop("previous", None) != previous:
        raise FedsimError("it does not follow the line before it.")
    if set(data) != _FIELDS or not isinstance(data["event"], Mapping):
        raise FedsimError("its fields are not those of a ledger.")
    return _entry(data), digest


def _entry(data: dict[str, Any]) -> Entry:
    # What it called draws was an unkeyed digest of data at example level: it is not kept, and
    # no release of format 1 is ever taken for the same as another.
    return Entry(
        kind=data["kind"],
        round=data["round"],
        event=_zero_out(Event.from_dict(data["event"]), data["level"]),
        level=data["level"],
        entropy=data["entropy"],
        mechanism=data["mechanism"],
        clip_norm=float("inf") if data["clip-norm"] == "inf" else data["clip-norm"],
        client=data["client"],
        settles=data["settles"],
        fragment=data["fragment"],
        version=1,
    )


def _zero_out(event: Event, level: Level) -> Event:
    if level == "example" and event.adjacency == "add-remove":
        return replace(event, law=replace(event.law, adjacency="zero-out"))
    return event

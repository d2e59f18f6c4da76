"""Lines of a ledger file: JSON, one an entry, each sealed with the hash of all before it.

A line is ``{"entry": {...}, "hash": "...", "noted": {...}}``. The hash covers the bytes of the
entry, which name the hash of the line before. What was noted on the side (time, host, the keyed
hashes that only a resumed run asks for) is covered by nothing, so that equal runs have equal heads.

What a chain proves: that no line was damaged, lost or swapped by accident. It has no secret:
whoever can write the file can seal a forged one, cut its end off or empty it. To notice that,
compare its head with one kept elsewhere (`fedsim privacy RUN --verify`), or sign it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast, get_args

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Level

GENESIS = "0" * 64
_BEFORE = '{"entry":'
HEADER = b'{"entry":{"kind":"ledger","version":'
"""What a ledger file begins with."""


def sealed(
    entry: Mapping[str, Any], previous: str, noted: Mapping[str, Any] | None = None
) -> tuple[bytes, str]:
    """One line with its newline, and its hash."""
    hashed, digest = sealed_part(entry, previous)
    beside = json.dumps(dict(noted or {}), separators=(",", ":"), allow_nan=False)
    return f'{hashed},"noted":{beside}}}\n'.encode(), digest


def sealed_part(entry: Mapping[str, Any], previous: str) -> tuple[str, str]:
    """A line up to and including its hash, and the hash."""
    body = json.dumps({**entry, "previous": previous}, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{_BEFORE}{body},"hash":"{digest}"', digest


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """Whole lines, without their newlines, and what stands after the last newline."""
    *lines, tail = data.split(b"\n")
    return lines, tail


def opened(line: bytes, previous: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Entry, what is noted beside it, and hash of a line that follows one of hash ``previous``.

    Raises
    ------
    FedsimError
        If the line is not one that `sealed` wrote there.
    """
    try:
        text = line.decode("ascii")
        if not text.startswith(_BEFORE):
            raise ValueError(text)
        entry, end = DECODER.raw_decode(text, len(_BEFORE))
    except (ValueError, RecursionError):
        raise FedsimError("it is not a ledger's line.") from None
    digest = hashlib.sha256(text[len(_BEFORE) : end].encode()).hexdigest()
    seal = f',"hash":"{digest}"'
    if not isinstance(entry, dict) or not text.startswith(seal, end):
        raise FedsimError("its hash does not match its content.")
    beside = text[end + len(seal) :]
    noted = parsed(f"{{{beside[1:]}") if beside.startswith(',"noted":') else None
    if not isinstance(noted, dict) or not isinstance(noted["noted"], dict):
        raise FedsimError("what is noted beside its entry is not legible.")
    if entry.pop("previous", None) != previous:
        raise FedsimError("it does not follow the line before it.")
    return entry, noted["noted"], digest


def parsed(text: str | bytes) -> Any:
    """JSON without NaN, infinities or depths that only a stranger would write.

    Raises
    ------
    FedsimError
        If it is not.
    """
    try:
        return DECODER.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError):
        raise FedsimError("it is not a ledger's line.") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of a ledger")


DECODER = json.JSONDecoder(parse_constant=_no_constant)
"""Of JSON without NaN and infinities."""


VERSION: Literal[3] = 3
"""Of the format that is written. In format 2 an event said rate and size beside a sampler."""


@dataclass(frozen=True)
class Header:
    """What all lines of a ledger have in common.

    Attributes
    ----------
    level : "client" or "example"
        What a row of its releases is.
    client : int or None
        Whose examples, at example level.
    """

    level: Level
    client: int | None = None

    def sealed(self) -> tuple[bytes, str]:
        """The line with its newline, and its hash."""
        about = {"level": self.level, "client": self.client}
        return sealed({"kind": "ledger", "version": VERSION, **about}, GENESIS)

    @classmethod
    def of(cls, line: bytes) -> tuple[Header, str]:
        """The header that a line is, and its hash.

        Raises
        ------
        FedsimError
            If it is none, or of a format that this fedsim does not know.
        """
        if not line.startswith(HEADER):
            raise FedsimError(
                "it is not a ledger; a ledger is a file that fedsim wrote, such as "
                "runs/NAME/ledger.jsonl."
            )
        data, _, head = opened(line, GENESIS)
        version = data.pop("version", None)
        if version not in (2, VERSION):
            raise FedsimError(
                f"its format is {version}; this fedsim reads formats 1 to {VERSION}: read it "
                "with the fedsim that wrote it."
            )
        return cls._checked(data), head

    @classmethod
    def _checked(cls, data: dict[str, Any]) -> Header:
        level, client = data.get("level"), data.get("client")
        known = set(data) == {"kind", "level", "client"} and level in get_args(Level)
        if not known or isinstance(client, bool) or not isinstance(client, int | None):
            raise FedsimError("its header is not one that fedsim wrote.")
        return cls(cast(Level, level), client)

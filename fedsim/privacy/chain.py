"""Lines of a ledger file: JSON, one an event, each sealed with the hash of all before it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsim.errors import FedsimError

__all__ = ["GENESIS", "append_durably", "opened", "replace_durably", "sealed", "split"]

GENESIS = "0" * 64
_SEAL = len(',"hash":""}') + 64


def sealed(entry: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """One line with its newline, and its hash.

    The hash covers the bytes of the line before it, ``previous`` among them.
    """
    body = json.dumps({**entry, "previous": previous}, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-1]},"hash":"{digest}"}}\n'.encode(), digest


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """Whole lines, without their newlines, and what stands after the last newline."""
    *lines, rest = data.split(b"\n")
    return lines, rest


def opened(line: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """Entry and hash of a line that follows one whose hash is ``previous``.

    Raises
    ------
    FedsimError
        If the line is not one that `sealed` wrote there.
    """
    body, seal = line[:-_SEAL] + b"}", line[-_SEAL:]
    digest = hashlib.sha256(body).hexdigest()
    if seal != f',"hash":"{digest}"}}'.encode():
        raise FedsimError("its hash does not match its content.")
    entry: dict[str, Any] = json.loads(body)
    if entry.pop("previous") != previous:
        raise FedsimError("it does not follow the line before it.")
    return entry, digest


def append_durably(path: Path, line: bytes, *, expected_size: int) -> None:
    """Append, and return only when the line is on the disk.

    Raises
    ------
    FedsimError
        If the file does not have ``expected_size`` bytes: somebody else writes to it, and
        two writers would fork the chain.
    """
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END) != expected_size:
            raise FedsimError(f"ledger {path} was changed by another process while in use.")
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if new:
        _sync_directory(path.parent)


def replace_durably(path: Path, data: bytes) -> None:
    """Put a file's new content in its place, whole or not at all."""
    temporary = path.with_name(path.name + ".repair")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

"""Files that are on the disk when a function returns, and one writer at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedsim import regular_files

__all__ = ["append", "create", "locked", "replace", "sync_directory"]


def create(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Put a new file there, whole; False if there was one already, which stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _written(path, data, mode)
    try:
        # Unlike a rename, a link never takes the place of somebody else's file.
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if path.exists():
            return False
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def replace(path: Path, data: bytes) -> None:
    """Put a file's new content in its place, whole or not at all."""
    os.replace(_written(path, data, 0o666), path)
    sync_directory(path.parent)


def append(file: BinaryIO, data: bytes) -> None:
    """Add to the end of a file that is held by `locked`."""
    file.seek(0, os.SEEK_END)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def locked(path: Path, *, write: bool = True) -> Iterator[BinaryIO]:
    """The file, open, while no other process of ours writes to it.

    Raises
    ------
    OSError
        If it is not there or may not be opened.
    """
    while True:
        with open(path, "r+b" if write else "rb", opener=regular_files.opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
            # While we waited, a repair may have put another file in its place.
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                yield file
                return


def sync_directory(path: Path) -> None:
    """Make the names in a directory as durable as their files."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _written(path: Path, data: bytes, mode: int) -> Path:
    """A synced file of this content beside ``path``."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return temporary

"""Files that last: written durably by one writer at a time, and archived where they are replaced.

A ledger that is replaced still counts. What replaces ``DIR/some/ledger.jsonl`` first moves it
to ``DIR/archive/NUMBER/some/ledger.jsonl``: a run that is overwritten does so with all its ledgers
at once, a ledger of an old format with itself.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedsim import regular_files


def create(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Put a new file there, whole; False if there was one already, which stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _written(path, data, mode)
    try:
        # Unlike a rename, a link never replaces a file that another process has just written.
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


def replace(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Put a file's new content in its place, whole or not at all.

    Raises
    ------
    OSError
        Naming ``path``.
    """
    with named_errors(path):
        os.replace(_written(path, data, mode), path)
        sync_directory(path.parent)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Let errors of writing a file, which name none or a temporary one, name ``path``."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


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


ARCHIVE = "archive"
"""Name of the directory that holds predecessors."""

# A client's ledger in a run's directory: RUN/clients/client-3.jsonl, or in a directory there.
_DEEPEST = 3


def archived(path: Path, depth: int = _DEEPEST) -> list[Path]:
    """What stood at ``path`` before, the oldest first; ``*`` in its name stands for anything.

    Parameters
    ----------
    path : path
    depth : int
        How many of the directories that it is in may have an archive.
    """
    predecessors: list[Path] = []
    path = path.absolute()
    for parent in path.parents[:depth]:
        inside = path.relative_to(parent)
        for number in _numbers(parent / ARCHIVE):
            before = parent / ARCHIVE / str(number) / inside
            for predecessor in sorted(before.parent.glob(before.name)):
                # What had been replaced already when it was put away.
                if parent != path.parent:
                    predecessors += archived(predecessor, depth=1)
                predecessors.append(predecessor)
    return predecessors


def archive(*paths: Path) -> Path:
    """Move files and directories of one directory into its archive together; where they are then.

    What a ledger holds is still counted there.
    """
    directory = paths[0].parent / ARCHIVE
    directory.mkdir(exist_ok=True)
    while True:
        place = directory / str(max([0, *_numbers(directory)]) + 1)
        try:
            place.mkdir()
            break
        except FileExistsError:
            continue
    for path in paths:
        os.rename(path, place / path.name)
    for changed in (place, directory, directory.parent):
        sync_directory(changed)
    return place


def _numbers(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    names = (entry.name for entry in directory.iterdir())
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())

"""Durable files: synced to disk, and locked while written."""

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
    """Create a file atomically; False if the path exists already, which is then unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with named_errors(path):
        temporary = _temporary_file(path, data, mode)
    try:
        # Unlike a rename, a link never replaces a file that another process has just created.
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
    """Replace a file's content atomically.

    Raises
    ------
    OSError
        If it cannot be written; the error names ``path``.
    """
    with named_errors(path):
        temporary = _temporary_file(path, data, mode)
        try:
            os.replace(temporary, path)
        except OSError:  # such as a directory of this name
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Make errors of writing name ``path``: they name no file, or a temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def append(file: BinaryIO, data: bytes) -> None:
    """Append to a file that was opened by `locked`, and sync it."""
    with named_errors(Path(file.name)):
        file.seek(0, os.SEEK_END)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def locked(path: Path, *, write: bool = True) -> Iterator[BinaryIO]:
    """Open a file under a lock: exclusive to write, else shared with other readers.

    Raises
    ------
    OSError
        If the file does not exist or may not be opened.
    """
    while True:
        with open(path, "r+b" if write else "rb", opener=regular_files.opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
            # The lock is of the file, not of its name: while we waited a repair may have renamed
            # another file to this path. Writing to the old one would lose the line.
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                yield file
                return


def sync_directory(path: Path) -> None:
    """Sync a directory: a new or renamed file survives a crash only after that."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _temporary_file(path: Path, data: bytes, mode: int) -> Path:
    """Temporary file with this content, synced, in the directory of ``path``."""
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

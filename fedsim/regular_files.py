"""A user's files are opened here: regular ones, without waiting for anybody.

A FIFO, a terminal or a socket under a file's name would keep its reader for ever, and a device
such as ``/dev/zero`` never ends. What is no regular file is an `OSError`, as one that is not there.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def opener(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file, as `os.open`: the ``opener`` of `open`.

    Raises
    ------
    OSError
        If it cannot be opened, or is no regular file.
    """
    try:
        # A FIFO or a modem would else make the call itself wait.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a FIFO that nobody reads
            raise _irregular(path) from None
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise _irregular(path)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file.

    Raises
    ------
    OSError
        As `opener` does, or if it cannot be read.
    """
    with open(path, "rb", opener=opener) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], errors: str = "strict") -> str:
    """The content of a text file in UTF-8; lines end in a newline, however they do in the file.

    Raises
    ------
    OSError
        As `read_bytes` does.
    UnicodeDecodeError
        A `ValueError`: if it is not UTF-8, unless ``errors`` says what to make of it.
    """
    with open(path, encoding="utf-8", errors=errors, opener=opener) as file:
        return file.read()


def require(path: Path) -> Path:
    """The same path, for a library that opens the file itself.

    Raises
    ------
    OSError
        If the file cannot be opened, or is no regular file.
    """
    os.close(opener(path, os.O_RDONLY))
    return path


def require_all(directory: Path) -> Path:
    """The same directory, for a library that reads what is in it, at any depth.

    Raises
    ------
    OSError
        If something in it is neither a directory nor a regular file that can be opened.
    """
    for path in sorted(directory.rglob("*")):
        if not path.is_dir():
            require(path)
    return directory


def _irregular(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))

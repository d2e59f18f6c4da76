"""Opens users' files: regular ones only, without ever blocking.

Reading a FIFO, a terminal or a socket under a file's name could block for ever, and a device
such as ``/dev/zero`` never ends. Whatever is no regular file raises `OSError`, like a missing file.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

RUN_MARKER = ".fedsim-run"
"""Name of the file that marks a directory as a run's; see `fedsim.runs.run_lock`."""

MAX_PARTS = 64
"""Parts that a dotted key of a TOML file may have."""

_PART = rb"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(
    rb"^[ \t[]*%b(?:[ \t]*\.[ \t]*%b){%d}" % (_PART, _PART, MAX_PARTS), re.MULTILINE
)


def opener(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a regular file like `os.open`; to be passed as the ``opener`` of `open`.

    Raises
    ------
    OSError
        If it cannot be opened, or is no regular file.
    """
    try:
        # Without O_NONBLOCK the call itself would block on a FIFO or a modem.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a FIFO without a reader
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
    """Content of a regular file.

    Raises
    ------
    OSError
        If it cannot be opened or read, or is no regular file.
    """
    with open(path, "rb", opener=opener) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], errors: str = "strict") -> str:
    """Content of a text file in UTF-8; all its line endings become newlines.

    Raises
    ------
    OSError
        If it cannot be opened or read, or is no regular file.
    UnicodeDecodeError
        A `ValueError`: if it is not UTF-8 and ``errors`` (see `open`) is "strict".
    """
    with open(path, encoding="utf-8", errors=errors, opener=opener) as file:
        return file.read()


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file.

    Raises
    ------
    OSError
        As `read_bytes` does.
    ValueError
        As `parse_toml` does.
    """
    return parse_toml(read_bytes(path))


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse the content of a TOML file.

    Raises
    ------
    ValueError
        If its syntax or its encoding is bad, an integer has too many digits, or a key too many
        parts.
    """
    if _LONG_KEY.search(content):  # the parser's time grows with the square of the parts
        raise ValueError(f"a dotted key has more than {MAX_PARTS} parts")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))  # Windows' editors may add a BOM
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):  # Python's advice, which is no use here
            raise ValueError("an integer has too many digits") from None
        raise


def require(path: Path) -> Path:
    """Check a file that a library will open itself, and return its path.

    Raises
    ------
    OSError
        If the file cannot be opened, or is no regular file.
    """
    os.close(opener(path, os.O_RDONLY))
    return path


def require_all(directory: Path) -> Path:
    """Check all files of a directory that a library will read, at any depth; return the directory.

    Raises
    ------
    OSError
        If an entry is neither a directory nor a regular file that can be opened.
    """
    for path in sorted(directory.rglob("*")):
        if not path.is_dir():
            require(path)
    return directory


def unwritable(directory: Path) -> Path | None:
    """What stands in the way of files in a directory, which may still have to be created.

    Returns
    -------
    path or None
        The directory or its nearest parent that exists, if that is no writable directory.
    """
    places = (directory.absolute(), *directory.absolute().parents)
    nearest = next(place for place in places if os.path.lexists(place))
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return None if writable else nearest


def run_directory_of(path: Path) -> Path | None:
    """The directory marked as a run's that is this path or contains it; None if there is none."""
    places = (path.absolute(), *path.absolute().parents)
    return next((place for place in places if os.path.lexists(place / RUN_MARKER)), None)


def _irregular(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))

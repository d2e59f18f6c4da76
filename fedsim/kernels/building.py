"""Builds C libraries at their first use, caches them, and loads them.

A library is in the user's cache under a digest of all that it was built from, so that a process
finds the right one or none. Without a compiler, without a cache directory, or if a library fails
its self-test, numpy and torch do the work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

DISABLED = "FEDSIM_COMPILED"
"""Environment variable that switches compiled kernels off if it is "0"."""

# The last two leave out errno and traps, which have no effect on results.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
# Whether a product and its sum are one rounding changes bytes, so it is always set explicitly.
# For some processors GCC would not fuse the products and additions of a long sum, as other builds
# do: the parameter makes it.
FUSED = ("-ffp-contract=fast", "--param=avoid-fma-max-bits=0")
UNFUSED = ("-ffp-contract=off",)
PROCESSOR = "-march=native"
# Timeout for a compiler that hangs. All sources take four seconds of CPU time; a busy machine must
# not be a reason to train with other kernels.
SECONDS = 600


def library(
    source: str,
    self_test: Callable[[ctypes.CDLL], bool],
    archives: tuple[Path, ...] = (),
    flags: tuple[str, ...] = UNFUSED,
) -> ctypes.CDLL | None:
    """A C file of this package, compiled and loaded; None if that is not possible.

    Parameters
    ----------
    source : str
        Name of the file.
    self_test : callable
        Whether a library gives correct results; also declares its functions' arguments.
    archives : tuple of path
        Static libraries that it is linked with.
    flags : tuple of str
        Compiler flags in addition to `FLAGS`.
    """
    if os.environ.get(DISABLED) == "0":
        return None
    try:
        compiled = ctypes.CDLL(str(built(Path(__file__).with_name(source), archives, flags)))
        if self_test(compiled):
            return compiled
        _log.warning("compiled, %s gives wrong results; it is not used", source)
    # No compiler, or it does not know the flags; no cache directory (RuntimeError if the user has
    # no home); a missing symbol.
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:
        _log.debug("%s is not compiled (%s)", source, error)
    return None


def declare(compiled: ctypes.CDLL, arguments: Mapping[str, Sequence[Any]]) -> None:
    """Declare the arguments of a library's functions, which return nothing."""
    for name, types in arguments.items():
        function = getattr(compiled, name)
        function.argtypes, function.restype = types, None


def loaded(compiled: ctypes.CDLL | None) -> ctypes.CDLL:
    """A library that is known to exist: callers have checked that."""
    assert compiled is not None
    return compiled


def _cache() -> Path:
    """The directory of libraries, which only this user can write to.

    Raises
    ------
    OSError
        If it cannot be made, or others could write to it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base) / "fedsim"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(directory)
    return directory


def _require_private(path: Path) -> None:
    """Raise OSError if another user could have written a path whose code is about to be run."""
    status = path.lstat()
    write_bits = stat.S_IWGRP | stat.S_IWOTH
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & write_bits:
        raise PermissionError(f"{path} must be writable by this user alone")


def built(
    source: Path,
    archives: tuple[Path, ...] = (),
    flags: tuple[str, ...] = UNFUSED,
    processor: str = PROCESSOR,
) -> Path:
    """The library of a source for a kind of processor, compiled unless it is cached.

    Raises
    ------
    OSError, subprocess.SubprocessError
        If it cannot be made.
    """
    options = [*FLAGS, *flags, processor]
    parts = [source.read_bytes(), *(archive.read_bytes() for archive in archives)]
    parts += [" ".join(options).encode(), _processor()]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    path = _cache() / f"{source.stem}-{digest[:32]}.so"
    if path.exists():
        _require_private(path)
        return path
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    _announce()
    # Written to a draft and renamed: processes that start together find a whole library or none.
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        draft = Path(directory) / path.name
        command = [compiler, *options, str(source), *map(str, archives), "-lm", "-o", str(draft)]
        subprocess.run(
            command, check=True, timeout=SECONDS, stdin=subprocess.DEVNULL, capture_output=True
        )
        draft.chmod(0o700)
        os.replace(draft, path)
    return path


@functools.cache
def _announce() -> None:
    """Log once why a run starts some seconds late."""
    _log.warning("compiling fedsim's kernels, once on this machine: about four seconds")


def _processor() -> bytes:
    """What -march=native depends on: machines that share a home directory may differ in it."""
    described = [platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        described += [line for line in lines if line.startswith(("flags", "Features"))][:1]
    except OSError:  # not Linux
        described.append(platform.processor())  # asks another process
    return "\n".join(described).encode()

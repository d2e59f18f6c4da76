"""The marker file of a run's directory: the run's id, and the lock of the run that writes to it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
from pathlib import Path

from fedsim import regular_files
from fedsim.errors import FedsimError

RUN_FORMAT = 1
PROBE_SECONDS = 0.1
"""Longer than another process holds the lock only to see whether it is free (`RunLock.is_free`)."""

# Some network file systems have no locks; there only the marker guards a directory.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def is_marked(directory: Path) -> bool:
    """Whether a directory is marked as a run's.

    Raises
    ------
    FedsimError
        If a later fedsim wrote it, whose files may have other names and meanings.
    """
    marker = directory / regular_files.RUN_MARKER
    try:
        content = json.loads(regular_files.read_text(marker) or "{}")
        run_format = int(content.get("format", RUN_FORMAT))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise FedsimError(
            f"{marker} is damaged; a run's marker holds a JSON object with its format."
        ) from None
    if run_format > RUN_FORMAT:
        raise FedsimError(
            f"{directory} belongs to a run of format {run_format}, and this fedsim knows "
            f"{RUN_FORMAT}; use the newer fedsim, or choose another directory."
        )
    return True


def run_id(directory: Path) -> str:
    """The random id of the run in a directory, from its marker.

    Raises
    ------
    FedsimError
        If there is no marker, or it is damaged.
    """
    marker = directory / regular_files.RUN_MARKER
    try:
        run = json.loads(regular_files.read_text(marker))["run"]
    except (OSError, ValueError, TypeError, KeyError):
        run = None
    if not isinstance(run, str) or not run:
        raise FedsimError(
            f"{marker} is missing or damaged, and has the run's id; restore it, or choose another "
            "directory."
        )
    return run


class RunLock:
    """Lock on a run directory's marker file, held by the run that writes there.

    It is a `flock`, so that the kernel releases it when the process ends, even by SIGKILL.

    Parameters
    ----------
    directory : Path
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / regular_files.RUN_MARKER
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Create the marker if it does not exist, and lock it.

        Returns
        -------
        bool
            False if another run holds it.
        """
        while True:
            descriptor = regular_files.opener(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            deadline = time.monotonic() + PROBE_SECONDS
            while not _try_lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    os.close(descriptor)
                    return False
                time.sleep(PROBE_SECONDS / 10)
            if self._is_still_linked(descriptor):
                break
            # The holder removed the file between our opening and locking it: what we locked no
            # longer has this name. Open it again.
            os.close(descriptor)
        self._descriptor = descriptor
        if not os.fstat(descriptor).st_size:
            self.renew()
        return True

    def renew(self) -> None:
        """Write a new random id into the marker, for a new run; the lock must be held."""
        assert self._descriptor is not None
        content = json.dumps({"format": RUN_FORMAT, "run": secrets.token_hex(16)}) + "\n"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content.encode(), 0)
        os.fsync(self._descriptor)

    def is_free(self) -> bool:
        """Whether no run holds the lock."""
        try:
            probe = regular_files.opener(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            return _try_lock(probe, fcntl.LOCK_SH)
        finally:
            os.close(probe)

    def release(self, *, remove: bool = False) -> None:
        """Unlock; with ``remove``, also delete the marker (first, while no other can lock it)."""
        if self._descriptor is None:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def _is_still_linked(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False


def _try_lock(descriptor: int, kind: int) -> bool:
    """Lock a file without waiting; False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True

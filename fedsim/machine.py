"""What this machine can hold, so that what cannot fit is refused before anybody allocates it."""

from __future__ import annotations

import os
from pathlib import Path

from fedsim.errors import FedsimError

_CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory() -> int:
    """Bytes of memory that this machine, or the container around this process, has."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CONTAINERS:
        try:
            sizes.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # there is none, or it is without a limit
    return min(sizes)


def refuse_larger_than_memory(size: int, what: str) -> None:
    """Refuse ``what``, which needs ``size`` bytes, where there are not so many.

    Raises
    ------
    FedsimError
    """
    if size > memory():
        raise FedsimError(
            f"{what} needs {size / 2**30:,.1f} GiB; it must fit into the {memory() / 2**30:,.1f} "
            "GiB of this machine."
        )

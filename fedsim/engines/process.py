"""What a process that trains asks of its libraries: one thread, and memory that stays."""

from __future__ import annotations

import ctypes
import sys

import torch

__all__ = ["settle"]

# Of glibc's <malloc.h>; 32 MiB is the most that it accepts for what is mapped on its own.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED_FROM, KEPT = 2**25, 2**30


def settle() -> None:
    """One torch thread, and freed memory kept for the next block.

    Workers, not threads, spread work over cores. Blocks of one size come and go all the time:
    by its defaults glibc gives their pages back after each and asks for fresh ones, which the
    kernel clears first; that was up to two fifths of a round's time. Other C libraries are
    left as they are.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)
            mallopt(M_TRIM_THRESHOLD, KEPT)

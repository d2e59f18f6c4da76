"""Library settings of a process that trains: one thread, kept memory, torch's own defaults."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Of glibc's <malloc.h>; 32 MiB is the most that it accepts for what is mapped on its own.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED_FROM, KEPT = 2**25, 2**30


def use_one_thread() -> None:
    """One torch thread, and freed memory kept. Workers, not threads, spread work over cores."""
    torch.set_num_threads(1)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Keep what is freed for the next block.

    Blocks of one size come and go all the time: by its defaults glibc gives their pages back
    after each and asks for fresh ones, which the kernel clears first; that was up to two fifths
    of a round's time. Other C libraries are left as they are.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)
            mallopt(M_TRIM_THRESHOLD, KEPT)


@contextmanager
def torch_defaults() -> Iterator[None]:
    """`use_one_thread`, and torch's own defaults for as long as it lasts.

    What a caller has set for work of their own (a default dtype or device, fewer bits in products,
    autocast, inference mode) would change a run's bytes, which follow from its config alone.
    """
    use_one_thread()
    dtype, device = torch.get_default_dtype(), _default_device()
    precision = torch.get_float32_matmul_precision()
    moved = device.type != "cpu"  # a default that is set costs every call something
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    if moved:
        torch.set_default_device("cpu")  # torch 2.6 fails where a caller's is replaced by None
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        if moved:
            torch.set_default_device(device)


def _default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # of torch 2.6, once a user has set it back to None
        return torch.device("cpu")

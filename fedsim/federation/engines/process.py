"""Library settings of a training process: one thread, freed memory reused, torch's defaults."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Constants of glibc's <malloc.h>; 32 MiB is the largest M_MMAP_THRESHOLD that it accepts.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_BYTES, TRIM_BYTES = 2**25, 2**30


def use_one_thread() -> None:
    """Use one torch thread, and keep freed memory. Workers, not threads, spread work over cores."""
    torch.set_num_threads(1)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next block.

    Blocks of one size are allocated and freed all the time. By default glibc returns their pages to
    the kernel and requests new ones, which the kernel clears first; that took up to two fifths of a
    round's time. Other C libraries are not changed.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
            mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Context with `use_one_thread` and torch's own defaults, restoring the caller's afterwards.

    A caller's settings (a default dtype or device, lower precision of matrix products, autocast,
    inference mode) would change a run's bytes, which must depend on its config alone.
    """
    use_one_thread()
    dtype, device = torch.get_default_dtype(), _default_device()
    precision = torch.get_float32_matmul_precision()
    is_needed = device.type != "cpu"  # a default device slows every torch call
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    if is_needed:
        torch.set_default_device("cpu")  # None fails in torch 2.6 if a default device was set
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
        if is_needed:
            torch.set_default_device(device)


def _default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.6 raises it once a user has set the default back to None
        return torch.device("cpu")

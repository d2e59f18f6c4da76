"""Arithmetic on a GPU: exact, and repeatable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Arithmetic as on a CPU, and the same every time, where ``device`` is a GPU.

    By default a GPU rounds the factors of a convolution's products to ten bits (TF32), and may
    sum them in any order: cuDNN by the algorithm it picks, cuBLAS by the workspace it finds free
    where several streams are in use. cuBLAS reads the size of its workspaces from the environment
    when it is first called in a process; a value that is set already stays.
    """
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    products, allowed = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    ):
        products.allow_tf32 = False
        try:
            yield
        finally:
            products.allow_tf32 = allowed

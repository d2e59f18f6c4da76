"""Matrices that start on a cache line.

The matrix products of a CPU library pick their kernel by the alignment of what they are
given, so a client's bits would depend on where in a block it lies.
"""

from __future__ import annotations

import numpy as np

from fedsim.lazy import Tensor, torch

__all__ = ["LINE", "aligned_double", "aligned_empty", "empty_rows", "product"]

LINE = 64  # bytes


def aligned_empty(like: Tensor, n: int, *shape: int) -> Tensor:
    """Uninitialised ``[n, *shape]`` whose ``n`` parts are contiguous and start on a line."""
    per_line = LINE // like.element_size()
    size = 1
    for length in shape:
        size *= length
    stride = -(-size // per_line) * per_line
    return like.new_empty(n, stride)[:, :size].view(n, *shape)


def aligned_double(block: Tensor) -> Tensor:
    """A float64 copy of one matrix ``[p, q]`` or of ``[n, p, q]``, each on a line."""
    if block.dim() == 2:
        return block.to(torch.float64, copy=True)
    like = block.new_empty(0, dtype=torch.float64)
    return aligned_empty(like, *block.shape).copy_(block)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of one matrix each, or of ``n`` that start on a line: ``[..., p, r]``."""
    if a.dim() == 2:
        return a @ b
    return torch.bmm(a, b, out=aligned_empty(a, len(a), a.shape[1], b.shape[2]))


def empty_rows(n: int, d: int, dtype: torch.dtype) -> Tensor:
    """Rows ``[n, d]`` in a CPU's memory, uninitialised, that start on a cache line.

    Blocks of rows come and go. What one leaves the next one of its size fits into, as numpy asks
    for no more than that; torch asks for room to align it besides, which there is not, so that
    glibc finds ever new memory. And numpy asks for large pages where there are any.
    """
    size = n * d * dtype.itemsize
    room = torch.from_numpy(np.empty(size + LINE, dtype=np.uint8))
    first = -room.data_ptr() % LINE
    return room[first : first + size].view(dtype).view(n, d)

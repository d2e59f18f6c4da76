"""Matrices that start on a cache line.

The matrix products of a CPU library pick their kernel by the alignment of what they are
given, so a client's bits would depend on where in a block it lies.
"""

from __future__ import annotations

from fedsim.lazy import Tensor, torch

__all__ = ["LINE", "aligned_double", "aligned_empty", "product"]

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

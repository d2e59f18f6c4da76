"""Memory layout of a block's parameters: every matrix starts on a cache line.

A CPU library's matrix products choose their kernel by the alignment of their arguments, so that a
client's bits would depend on its place in a block. Here every parameter of every client starts on
a 64-byte boundary. The gaps between them are zero, and stay zero under any algorithm that works
coordinate by coordinate.

For the same reason some elementwise functions are defined here. On a CPU torch computes most of a
tensor with vector instructions and the remainder at its end one by one. For powers and sigmoid the
two differ in their last bits, so that a client's bits would depend on the other clients of its
block. Exponentials, logarithms, roots and the four basic operations have the same bits in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsim.lazy import Tensor, torch
from fedsim.rows.layout import Layout

LINE = 64  # bytes


@dataclass(frozen=True)
class Packing:
    """A layout with gaps for alignment: packed rows ``[n, D]`` of rows ``[n, d]``.

    Parameters
    ----------
    layout : Layout
    within : Packing, optional
        Packing of a larger layout that includes these entries: packed rows are then the larger
        layout's, in which other parameters lie in the gaps.
    """

    layout: Layout
    within: Packing | None = None

    @property
    def per_line(self) -> int:
        """Coordinates in a cache line."""
        return int(LINE // self.layout.dtype.itemsize)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Slice of a packed row for each parameter."""
        if self.within is not None:
            return {entry.name: self.within.slices[entry.name] for entry in self.layout.entries}
        slices: dict[str, slice] = {}
        start = 0
        for entry in self.layout.entries:
            size = entry.stop - entry.start
            slices[entry.name] = slice(start, start + size)
            start += -(-size // self.per_line) * self.per_line
        return slices

    @cached_property
    def width(self) -> int:
        """Length ``D`` of a packed row."""
        if self.within is not None:
            return self.within.width
        stop: int = self.slices[self.layout.entries[-1].name].stop
        return -(-stop // self.per_line) * self.per_line

    @cached_property
    def gapless_slices(self) -> tuple[tuple[slice, slice], ...]:
        """(slice of a row, slice of a packed row) for each maximal run without a gap."""
        slices: list[tuple[slice, slice]] = []
        for entry in self.layout.entries:
            packed = self.slices[entry.name]
            if slices and slices[-1][1].stop == packed.start:
                row, before = slices.pop()
                slices.append((slice(row.start, entry.stop), slice(before.start, packed.stop)))
            else:
                slices.append((slice(entry.start, entry.stop), packed))
        return tuple(slices)

    def pack(self, rows: Tensor) -> Tensor:
        """Rows ``[n, d]`` as ``[n, D]`` of the layout's dtype, zeros in the gaps."""
        packed = rows.new_zeros(len(rows), self.width, dtype=self.layout.dtype)
        for row, columns in self.gapless_slices:
            packed[:, columns] = rows[:, row]
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed rows ``[n, D]`` as ``[n, d]``."""
        rows = packed.new_empty(len(packed), self.layout.d)
        for row, columns in self.gapless_slices:
            rows[:, row] = packed[:, columns]
        return rows

    def difference_(self, packed: Tensor, vector: Tensor) -> Tensor:
        """``packed [n, D] - vector [d]``, coordinate by coordinate, as ``[n, d]``.

        If there is no gap, ``packed`` is overwritten and the result is a view of it; otherwise the
        result is a new tensor.
        """
        if len(self.gapless_slices) == 1:
            ((row, columns),) = self.gapless_slices
            return packed[:, columns].sub_(vector[row])
        rows = packed.new_empty(len(packed), self.layout.d)
        for row, columns in self.gapless_slices:
            torch.sub(packed[:, columns], vector[row], out=rows[:, row])
        return rows

    def named(self, packed: Tensor) -> dict[str, Tensor]:
        """Views of the parameters in packed rows ``[..., D]``, by name: each ``[..., *shape]``."""
        lead = packed.shape[:-1]
        return {
            entry.name: packed[..., self.slices[entry.name]].view((*lead, *entry.shape))
            for entry in self.layout.entries
        }


def aligned_empty(like: Tensor, n: int, *shape: int) -> Tensor:
    """Uninitialised ``[n, *shape]`` whose ``n`` parts are contiguous and start on a cache line."""
    if n == 1:  # torch's allocations start on a cache line
        return like.new_empty(1, *shape)
    per_line = LINE // like.element_size()
    size = 1
    for length in shape:
        size *= length
    stride = -(-size // per_line) * per_line
    return like.new_empty(n, stride)[:, :size].view(n, *shape)


def aligned_double(block: Tensor) -> Tensor:
    """Float64 copy of one matrix ``[p, q]`` or of n, ``[n, p, q]``, each on a cache line."""
    if block.dim() == 2:
        return block.to(torch.float64, copy=True)
    like = block.new_empty(0, dtype=torch.float64)
    return aligned_empty(like, *block.shape).copy_(block)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for one matrix each, or for n that start on a cache line: ``[..., p, r]``."""
    if a.dim() == 2:
        return a @ b
    return torch.bmm(a, b, out=aligned_empty(a, len(a), a.shape[1], b.shape[2]))


def empty_rows(n: int, d: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised rows ``[n, d]`` in CPU memory that start on a cache line.

    They are allocated by numpy. Blocks of one size are allocated and freed again and again: numpy
    asks for exactly the size of the block that was freed, and gets its memory. torch asks for some
    more, to align it, which does not fit, so that glibc takes new memory each time. numpy also
    requests huge pages.
    """
    size = n * d * dtype.itemsize
    room = torch.from_numpy(np.empty(size + LINE, dtype=np.uint8))
    first = -room.data_ptr() % LINE
    return room[first : first + size].view(dtype).view(n, d)


def power(values: Tensor, exponent: float) -> Tensor:
    """``values ** exponent`` for non-negative values."""
    if exponent in (0.5, 1.0):  # a root and a copy: torch's bits are safe
        return values.pow(exponent)
    return (values.double().log() * exponent).exp_().to(values.dtype)


def powers_of(base: float, exponents: Tensor) -> Tensor:
    """``base ** exponents`` for a base in [0, 1) and exponents above 0."""
    log = math.log(base) if base else -math.inf
    return (exponents.double() * log).exp_().to(exponents.dtype)


def sigmoid_(values: Tensor) -> Tensor:
    """``1 / (1 + exp(-values))``, in place."""
    return values.neg_().exp_().add_(1).reciprocal_()

"""How a block's parameters lie in memory: rows whose matrices all start on a cache line.

The matrix products of a CPU library pick their kernel by the alignment of what they are
given, so a client's bits would depend on where in a block it lies. Here every parameter of
every client starts on a 64-byte boundary; the gaps between them hold zeros and stay zero
under any algorithm that works coordinate by coordinate.

For the same reason some functions of each number stand here. On a CPU torch computes most of a
tensor by vector instructions and the rest at its end one by one, and for powers and sigmoid the two
differ in their last bits: a client's bits would depend on the other clients of its block.
Exponentials, logarithms, roots and the four operations are the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsim.lazy import Tensor, torch
from fedsim.rows.layout import Layout

LINE = 64  # bytes


def channels_last(images: Tensor) -> Tensor:
    """A copy of ``[B, C, H, W]`` with channels last, which is faster on a CPU.

    Unlike those of ``contiguous``, its strides are channels-last for one channel too, and the
    layers that follow keep them.
    """
    return torch.empty_like(images, memory_format=torch.channels_last).copy_(images)


def takes_channels_last(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether torch computes all of a model's convolutions correctly with channels last.

    For one channel, such strides are those of channels first too. With AVX-512, oneDNN as of torch
    2.15 then reads other numbers than it should where a stride leaves one column of outputs.
    """
    convolutions = (module for module in modules if isinstance(module, torch.nn.Conv2d))
    return all(module.in_channels > 1 or module.stride[1] == 1 for module in convolutions)


@dataclass(frozen=True)
class Packing:
    """A layout with gaps: packed rows ``[n, D]`` for rows ``[n, d]``.

    Parameters
    ----------
    layout : Layout
    within : Packing, optional
        Of a layout that has these entries among others: packed rows are its packed rows.
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
    def runs(self) -> tuple[tuple[slice, slice], ...]:
        """(slice of a row, slice of a packed row) for each stretch without a gap."""
        runs: list[tuple[slice, slice]] = []
        for entry in self.layout.entries:
            packed = self.slices[entry.name]
            if runs and runs[-1][1].stop == packed.start:
                row, before = runs.pop()
                runs.append((slice(row.start, entry.stop), slice(before.start, packed.stop)))
            else:
                runs.append((slice(entry.start, entry.stop), packed))
        return tuple(runs)

    def pack(self, rows: Tensor) -> Tensor:
        """Rows ``[n, d]`` as ``[n, D]`` of the layout's dtype, zeros in the gaps."""
        packed = rows.new_zeros(len(rows), self.width, dtype=self.layout.dtype)
        for row, inside in self.runs:
            packed[:, inside] = rows[:, row]
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Packed rows ``[n, D]`` as ``[n, d]``."""
        rows = packed.new_empty(len(packed), self.layout.d)
        for row, inside in self.runs:
            rows[:, row] = packed[:, inside]
        return rows

    def difference_(self, packed: Tensor, vector: Tensor) -> Tensor:
        """``packed [n, D] - vector [d]``, coordinate by coordinate, as ``[n, d]``.

        They lie where ``packed`` does, which is overwritten, unless there are gaps among them.
        """
        if len(self.runs) == 1:
            ((row, inside),) = self.runs
            return packed[:, inside].sub_(vector[row])
        rows = packed.new_empty(len(packed), self.layout.d)
        for row, inside in self.runs:
            torch.sub(packed[:, inside], vector[row], out=rows[:, row])
        return rows

    def named(self, packed: Tensor) -> dict[str, Tensor]:
        """Named views of packed rows ``[..., D]``: each ``[..., *shape]``."""
        lead = packed.shape[:-1]
        return {
            entry.name: packed[..., self.slices[entry.name]].view((*lead, *entry.shape))
            for entry in self.layout.entries
        }


def aligned_empty(like: Tensor, n: int, *shape: int) -> Tensor:
    """Uninitialised ``[n, *shape]`` whose ``n`` parts are contiguous and start on a line."""
    if n == 1:  # torch's own memory does
        return like.new_empty(1, *shape)
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


def power(values: Tensor, exponent: float) -> Tensor:
    """``values ** exponent`` of numbers that are not negative."""
    if exponent in (0.5, 1.0):  # a root, and a copy
        return values.pow(exponent)
    return (values.double().log() * exponent).exp_().to(values.dtype)


def powers_of(base: float, exponents: Tensor) -> Tensor:
    """``base ** exponents`` of a base in [0, 1) and exponents above 0."""
    log = math.log(base) if base else -math.inf
    return (exponents.double() * log).exp_().to(exponents.dtype)


def sigmoid_(values: Tensor) -> Tensor:
    """``1 / (1 + exp(-values))``, in place."""
    return values.neg_().exp_().add_(1).reciprocal_()

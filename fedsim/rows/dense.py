"""Rows: what mechanisms ask of a block, whether or not it is written out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.rows.exact import Owners
from fedsim.rows.norms import norms_, whiten_

CHUNK_BYTES = 2**22
CUDA_CHUNK_BYTES = 2**28

Weights: TypeAlias = "Tensor | npt.NDArray[np.float64] | npt.NDArray[np.bool_]"

Index = tuple[int | slice, slice]
"""(clients, rows of each) of ``[n, rows, d]``; one client's number drops the first axis."""


@runtime_checkable
class Rows(Protocol):
    """A block of rows ``[rows, d]``, or one for each of n clients, ``[n, rows, d]``.

    All that has one value, or one vector, for a sum of rows then has a leading ``n`` too.
    """

    @property
    def count(self) -> int:
        """Number of rows, of each client."""

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """``||(row - center) * scale||``, float64 ``[..., rows]``; NaN for a non-finite row.

        ``scale`` and ``center`` are float64 ``[..., d]``.
        """

    def measure(
        self, scale: Tensor | None = None, center: Tensor | None = None
    ) -> MeasuredRows | None:
        """The rows in these coordinates, without being written out but for a few.

        None if that could be any of them, or if they are written out already: the rows themselves
        must be looked at.
        """

    def sum(self, weights: Tensor) -> Tensor:
        """``sum_k weights_k row_k``, float64 ``[..., d]``; a row of weight zero adds nothing."""

    def dense(self) -> Tensor:
        """The rows themselves, ``[..., rows, d]``."""

    def columns(self, slices: Sequence[slice]) -> Rows:
        """The same rows over these columns only, in this order."""


@dataclass(frozen=True, eq=False)
class MeasuredRows:
    """Rows in coordinates ``(row - center) * scale``, and how long they are there.

    Attributes
    ----------
    rows : Rows
    norms : float64 Tensor ``[..., rows]``
        With a relative error below 2^-20, and so has a row in `sum`; NaN for a non-finite row.
    scale, center : float64 Tensor ``[..., d]``, optional
    written : mapping of indices to float64 Tensor ``[d]``
        Rows of which a formula would not be certain, in these coordinates.
    """

    rows: Rows
    norms: Tensor
    scale: Tensor | None = None
    center: Tensor | None = None
    written: Mapping[tuple[int, ...], Tensor] = field(default_factory=dict)

    def sum(self, weights: Tensor) -> Tensor:
        """Their weighted sum, float64 ``[..., d]``; a row of weight zero adds nothing."""
        certain = weights.clone() if self.written else weights
        for index in self.written:
            certain[index] = 0.0
        total = self.rows.sum(certain)
        if self.center is not None:
            total = total - certain.sum(-1, keepdim=True) * self.center
        if self.scale is not None:
            total = total * self.scale
        for index, row in self.written.items():
            if weights[index] > 0:
                total[index[:-1]] += row * weights[index]
        return total


class BlockRows(Rows, Protocol):
    """Rows of n clients, ``[n, rows, d]``."""

    def columns(self, slices: Sequence[slice]) -> BlockRows:
        """The same rows over these columns only, in this order."""

    def __getitem__(self, index: Index) -> BlockRows:
        """Some rows of some clients, or of one."""


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Rows that are there: ``tensor [..., rows, d]``, float32 or float64, CPU or CUDA."""

    tensor: Tensor

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.tensor.shape[-2]

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """Norms that neither overflow nor underflow where float64 holds them: ``[..., rows]``."""
        lengths = self.tensor.new_empty(self.tensor.shape[:-1], dtype=torch.float64)
        out = self._led(lengths)
        for (clients, chunk), y in self._pieces():
            # Vectors of all rows are `[d]`, those of each client `[n, d]`.
            vectors = (v if v is None or v.dim() == 1 else v[clients] for v in (scale, center))
            whiten_(y, *vectors)
            norms, unit = norms_(y)
            out[clients, chunk] = norms * unit
        return lengths

    def measure(self, scale: Tensor | None = None, center: Tensor | None = None) -> None:
        """None: they are written out."""

    def sum(self, weights: Tensor) -> Tensor:
        """A plain float64 sum, in the order of the rows: ``[..., d]``."""
        d = self.tensor.shape[-1]
        total = self.tensor.new_zeros(*self.tensor.shape[:-2], d, dtype=torch.float64)
        out, weights = self._led(total), self._led(weights)
        for (clients, chunk), y in self._pieces():
            weight = weights[clients, chunk, None].to(y)
            out[clients] += y.masked_fill_(weight == 0, 0.0).mul_(weight).sum(1)
        return total

    def dense(self) -> Tensor:
        """The tensor."""
        return self.tensor

    def columns(self, slices: Sequence[slice]) -> DenseRows:
        """The same rows over these columns only; a view where there is one slice."""
        if len(slices) == 1:
            return DenseRows(self.tensor[..., slices[0]])
        return DenseRows(torch.cat([self.tensor[..., column] for column in slices], dim=-1))

    def __getitem__(self, index: Index) -> DenseRows:
        """Some rows of some clients, or of one."""
        return DenseRows(self.tensor[index])

    def _led(self, tensor: Tensor) -> Tensor:
        """With the leading axis of several clients, if these are one's."""
        return tensor if self.tensor.dim() == 3 else tensor[None]

    def _pieces(self) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        block = self._led(self.tensor)
        return Chunks().of_block(DenseRows(block), [self.count] * len(block), block)


class Chunks:
    """Walks over blocks in pieces that fit the cache, in one buffer that it keeps."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def of(self, block: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Rows of ``block [rows, d]`` as float64 copies.

        Yields the slice of rows and a buffer ``[c, d]`` that the caller may overwrite and that
        the next iteration reuses.
        """
        for (_, chunk), y in self.of_block(DenseRows(block[None]), [len(block)], block):
            yield chunk, y[0]

    def of_block(
        self, rows: BlockRows, counts: Sequence[int], like: Tensor
    ) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """The first ``counts [n]`` of rows ``[n, B, d]``, as float64 copies ``[k, c, d]``.

        As `of`. On a CPU client by client; on a GPU as many clients at once as fit, with rows
        beyond their count where another has more. ``like [..., d]`` is on the device to use.
        """
        most, n, d = max(counts, default=0), len(counts), like.shape[-1]
        if most == 0:
            return
        fit = max(1, (CUDA_CHUNK_BYTES if like.is_cuda else CHUNK_BYTES) // (8 * max(d, 1)))
        c, k = min(fit, most), min(max(1, fit // most), n) if like.is_cuda else 1
        buffer = self._buffer
        if buffer is None or len(buffer) < k * c or buffer.shape[1] != d:
            buffer = like.new_empty(k * c, d, dtype=torch.float64)
            self._buffer = buffer
        for first in range(0, n, k):
            clients = slice(first, min(first + k, n))
            count = max(counts[clients])
            for start in range(0, count, c):
                chunk = slice(start, min(start + c, count))
                shape = (clients.stop - first, chunk.stop - start, d)
                y = buffer[: shape[0] * shape[1]].view(shape)
                yield (clients, chunk), y.copy_(rows[clients, chunk].dense())

    def of_owners(
        self, rows: Rows, counts: Sequence[int] | None, owners: Owners, like: Tensor
    ) -> Iterator[tuple[Owners, slice | tuple[slice, slice], Tensor]]:
        """Whose rows, which of them, and float64 copies ``[..., c, d]``; otherwise as `of_block`.

        Without ``counts`` the rows ``[rows, d]`` are all of one sum.
        """
        if counts is None:
            for chunk, y in self.of(rows.dense()):
                yield owners, chunk, y
            return
        for index, y in self.of_block(cast(BlockRows, rows), counts, like):
            if torch.is_tensor(owners):
                yield owners[index[0]], index, y
            else:
                chosen = range(len(like))[owners][index[0]]
                yield slice(chosen.start, chosen.stop), index, y


def scatter(out: Tensor, values: Tensor, columns: tuple[slice, ...] | None) -> None:
    """Put ``values [..., size]`` into these columns of ``out [..., d]``."""
    start = 0
    for column in (slice(None),) if columns is None else columns:
        into = out[..., column]
        into.copy_(values[..., start : start + into.shape[-1]])
        start += into.shape[-1]


def row_weights(
    weights: Weights | None, count: int, device: torch.device, highest: float = 1.0
) -> Tensor:
    """Weights as float64 ``[count]`` on ``device``; one each by default.

    Raises
    ------
    FedsimError
        If one is negative, above ``highest``, or NaN: that would exceed the sensitivity.
    """
    if weights is None:
        return torch.ones(count, dtype=torch.float64, device=device)
    tensor = torch.as_tensor(weights, dtype=torch.float64, device=device)
    if tensor.shape != (count,):
        raise FedsimError(f"weights have shape {tuple(tensor.shape)}; it must be ({count},).")
    if not bool(((tensor >= 0) & (tensor <= highest)).all()):
        raise FedsimError(f"weights of rows must lie in [0, {highest:g}]; one does not.")
    return tensor

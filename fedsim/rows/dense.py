"""Rows: the interface that mechanisms use, dense rows, and walks over rows in chunks."""

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
"""Index (clients, rows) into ``[n, rows, d]``; an int for clients drops the first axis."""


@runtime_checkable
class Rows(Protocol):
    """Interface of a block of rows ``[rows, d]``, or of one block per client, ``[n, rows, d]``.

    In the latter case, values and vectors that belong to a sum of rows have a leading ``n`` too.
    """

    @property
    def count(self) -> int:
        """Number of rows (of each client)."""

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """``||(row - center) * scale||``, float64 ``[..., rows]``; NaN for a non-finite row.

        ``scale`` and ``center`` are float64 ``[..., d]``.
        """

    def measure(
        self, scale: Tensor | None = None, center: Tensor | None = None
    ) -> MeasuredRows | None:
        """Norms in these coordinates, from factors, with only a few rows materialised.

        None for dense rows, or if it is unknown which rows must be materialised: the caller must
        then work on `dense` rows.
        """

    def sum(self, weights: Tensor) -> Tensor:
        """``sum_k weights_k row_k``, float64 ``[..., d]``; a row of weight zero adds nothing."""

    def dense(self) -> Tensor:
        """The rows themselves, ``[..., rows, d]``."""

    def columns(self, slices: Sequence[slice]) -> Rows:
        """The same rows over these columns only, in this order."""


@dataclass(frozen=True, eq=False)
class MeasuredRows:
    """Rows in coordinates ``(row - center) * scale``, with their norms there.

    Attributes
    ----------
    rows : Rows
    norms : float64 Tensor ``[..., rows]``
        Norms, with a relative error below 2^-20, as has each row in `sum`; NaN for a non-finite
        row.
    scale, center : float64 Tensor ``[..., d]``, optional
    exact_rows : mapping of indices to float64 Tensor ``[d]``
        Materialised rows, in these coordinates: those for which the formulas would be inaccurate.
    """

    rows: Rows
    norms: Tensor
    scale: Tensor | None = None
    center: Tensor | None = None
    exact_rows: Mapping[tuple[int, ...], Tensor] = field(default_factory=dict)

    def sum(self, weights: Tensor) -> Tensor:
        """Weighted sum of the rows, float64 ``[..., d]``; a row of weight zero adds nothing."""
        # The others by linearity: sum w (row - center) * scale, from one plain weighted sum.
        certain = weights.clone() if self.exact_rows else weights
        for index in self.exact_rows:
            certain[index] = 0.0
        total = self.rows.sum(certain)
        if self.center is not None:
            total = total - certain.sum(-1, keepdim=True) * self.center
        if self.scale is not None:
            total = total * self.scale
        for index, row in self.exact_rows.items():
            if weights[index] > 0:
                total[index[:-1]] += row * weights[index]
        return total


class BlockRows(Rows, Protocol):
    """Interface of rows of n clients, ``[n, rows, d]``."""

    def columns(self, slices: Sequence[slice]) -> BlockRows:
        """The same rows over these columns only, in this order."""

    def __getitem__(self, index: Index) -> BlockRows:
        """Some rows of some clients, or of one."""


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Materialised rows: ``tensor [..., rows, d]``, float32 or float64, CPU or CUDA."""

    tensor: Tensor

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.tensor.shape[-2]

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """Norms ``[..., rows]``, correct wherever float64 can represent the norm itself."""
        lengths = self.tensor.new_empty(self.tensor.shape[:-1], dtype=torch.float64)
        out = self._with_client_axis(lengths)
        for (clients, chunk), y in self._row_chunks():
            # A vector is `[d]` for all rows, or `[n, d]` with one for each client.
            vectors = (v if v is None or v.dim() == 1 else v[clients] for v in (scale, center))
            whiten_(y, *vectors)
            norms, unit = norms_(y)
            out[clients, chunk] = norms * unit
        return lengths

    def measure(self, scale: Tensor | None = None, center: Tensor | None = None) -> None:
        """None: the rows are materialised already."""

    def sum(self, weights: Tensor) -> Tensor:
        """Plain float64 sum in the order of the rows, ``[..., d]``; not exact."""
        d = self.tensor.shape[-1]
        total = self.tensor.new_zeros(*self.tensor.shape[:-2], d, dtype=torch.float64)
        out, weights = self._with_client_axis(total), self._with_client_axis(weights)
        for (clients, chunk), y in self._row_chunks():
            weight = weights[clients, chunk, None].to(y)
            # Wiped, since NaN times zero is NaN.
            out[clients] += y.masked_fill_(weight == 0, 0.0).mul_(weight).sum(1)
        return total

    def dense(self) -> Tensor:
        """The tensor."""
        return self.tensor

    def columns(self, slices: Sequence[slice]) -> DenseRows:
        """The same rows over these columns only; a view if there is one slice, else a copy."""
        if len(slices) == 1:
            return DenseRows(self.tensor[..., slices[0]])
        return DenseRows(torch.cat([self.tensor[..., column] for column in slices], dim=-1))

    def __getitem__(self, index: Index) -> DenseRows:
        """Some rows of some clients, or of one."""
        return DenseRows(self.tensor[index])

    def _with_client_axis(self, tensor: Tensor) -> Tensor:
        """View of a tensor of these rows with a leading axis of clients, if they have none."""
        return tensor if self.tensor.dim() == 3 else tensor[None]

    def _row_chunks(self) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        block = self._with_client_axis(self.tensor)
        return Chunks().split_block(DenseRows(block), [self.count] * len(block), block)


class Chunks:
    """Walks over blocks in float64 copies of cache size, all in one reused buffer."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def split(self, block: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Rows of ``block [rows, d]`` as float64 copies.

        Yields the slice of rows and a buffer ``[c, d]``. The caller may overwrite the buffer, but
        not keep it: the next iteration reuses its memory.
        """
        for (_, chunk), y in self.split_block(DenseRows(block[None]), [len(block)], block):
            yield chunk, y[0]

    def split_block(
        self, rows: BlockRows, counts: Sequence[int], like: Tensor
    ) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """Float64 copies ``[k, c, d]`` of the first ``counts [n]`` of rows ``[n, B, d]``.

        As with `split`, the buffer is reused. On a CPU k is 1. On a GPU a copy has as many clients
        as fit, and some rows beyond a client's count if another client has more. ``like [..., d]``
        determines the device.
        """
        max_count, n, d = max(counts, default=0), len(counts), like.shape[-1]
        if max_count == 0:
            return
        # On a CPU a piece stays in the cache from its copy to its addition. On a GPU pieces are
        # large, since each costs several kernel launches.
        fit = max(1, (CUDA_CHUNK_BYTES if like.is_cuda else CHUNK_BYTES) // (8 * max(d, 1)))
        c, k = min(fit, max_count), min(max(1, fit // max_count), n) if like.is_cuda else 1
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

    def split_by_owner(
        self, rows: Rows, counts: Sequence[int] | None, owners: Owners, like: Tensor
    ) -> Iterator[tuple[Owners, slice | tuple[slice, slice], Tensor]]:
        """As `split_block`, with the owners of each copy: (owners, index, copy ``[..., c, d]``).

        Without ``counts``, all rows ``[rows, d]`` belong to one sum.
        """
        if counts is None:
            for chunk, y in self.split(rows.dense()):
                yield owners, chunk, y
            return
        for index, y in self.split_block(cast(BlockRows, rows), counts, like):
            if torch.is_tensor(owners):
                yield owners[index[0]], index, y
            else:
                owner_range = range(len(like))[owners][index[0]]
                yield slice(owner_range.start, owner_range.stop), index, y


def scatter(out: Tensor, values: Tensor, columns: tuple[slice, ...] | None) -> None:
    """Copy ``values [..., size]`` into these columns of ``out [..., d]``."""
    start = 0
    for column in (slice(None),) if columns is None else columns:
        into = out[..., column]
        into.copy_(values[..., start : start + into.shape[-1]])
        start += into.shape[-1]


def row_weights(
    weights: Weights | None, count: int, device: torch.device, highest: float = 1.0
) -> Tensor:
    """Weights as float64 ``[count]`` on ``device``; by default all 1.

    Raises
    ------
    FedsimError
        If a weight is negative, above ``highest`` or NaN: a row could then exceed its bound.
    """
    if weights is None:
        return torch.ones(count, dtype=torch.float64, device=device)
    tensor = torch.as_tensor(weights, dtype=torch.float64, device=device)
    if tensor.shape != (count,):
        raise FedsimError(f"weights have shape {tuple(tensor.shape)}; it must be ({count},).")
    if not bool(((tensor >= 0) & (tensor <= highest)).all()):
        raise FedsimError(f"weights of rows must lie in [0, {highest:g}]; one does not.")
    return tensor

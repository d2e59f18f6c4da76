"""Rows: what mechanisms ask of a block, whether or not it is materialised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["Chunks", "DenseRows", "Rows", "chunks", "norms_", "round_up"]

CHUNK_BYTES = 2**22
CUDA_CHUNK_BYTES = 2**28

# Squares of float64 entries beyond these may overflow or lose all their digits.
SMALL, LARGE = 2.0**-400, 2.0**400


@runtime_checkable
class Rows(Protocol):
    """A block of rows ``[rows, d]``."""

    @property
    def count(self) -> int:
        """Number of rows."""

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """``||(row - center) * scale||``, float64 ``[rows]``; NaN for a non-finite row.

        ``scale`` and ``center`` are float64 ``[d]``.
        """

    def sum(self, weights: Tensor) -> Tensor:
        """``sum_k weights_k row_k``, float64 ``[d]``; a row of weight zero adds nothing."""

    def dense(self) -> Tensor:
        """The rows themselves, ``[rows, d]``."""

    def columns(self, slices: Sequence[slice]) -> Rows:
        """The same rows over these columns only, in this order."""


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Rows that are there: ``tensor [rows, d]``, float32 or float64, CPU or CUDA."""

    tensor: Tensor

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.tensor)

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """See `Rows`. Neither overflows nor underflows where the norm itself does not."""
        parts = []
        for _, y in chunks(self.tensor):
            if center is not None:
                y.sub_(center)
            if scale is not None:
                y.mul_(scale)
            norms, unit = norms_(y)
            parts.append(norms if unit is None else norms * unit)
        if not parts:
            return torch.zeros(0, dtype=torch.float64, device=self.tensor.device)
        return torch.cat(parts)

    def sum(self, weights: Tensor) -> Tensor:
        """See `Rows`; a plain float64 sum, in the order of the rows."""
        total = torch.zeros(self.tensor.shape[1], dtype=torch.float64, device=self.tensor.device)
        for part, y in chunks(self.tensor):
            weight = weights[part].to(y)
            total += y.masked_fill_((weight == 0)[:, None], 0.0).mul_(weight[:, None]).sum(0)
        return total

    def dense(self) -> Tensor:
        """The tensor."""
        return self.tensor

    def columns(self, slices: Sequence[slice]) -> DenseRows:
        """See `Rows`; a view where there is one slice."""
        if len(slices) == 1:
            return DenseRows(self.tensor[:, slices[0]])
        return DenseRows(torch.cat([self.tensor[:, part] for part in slices], dim=1))


class Chunks:
    """Walks over blocks in pieces that fit the cache, in one buffer that it keeps."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def of(self, block: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Rows of ``block [rows, d]`` as float64 copies.

        Yields the slice of rows and a buffer ``[c, d]`` that the caller may overwrite and that
        the next iteration reuses.
        """
        rows, d = block.shape
        limit = CUDA_CHUNK_BYTES if block.is_cuda else CHUNK_BYTES
        step = min(max(1, limit // (8 * max(d, 1))), max(rows, 1))
        buffer = self._buffer
        if buffer is None or len(buffer) < step or buffer.shape[1] != d:
            buffer = torch.empty(step, d, dtype=torch.float64, device=block.device)
            self._buffer = buffer
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            y = buffer[: part.stop - start]
            yield part, y.copy_(block[part])


def chunks(block: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """`Chunks.of` with a buffer of its own."""
    return Chunks().of(block)


def norms_(y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Norms of float64 rows ``y [c, d]``, whose extreme rows are rescaled in place.

    Returns
    -------
    norms : float64 ``[c]``
        Of the rows as they now stand; NaN where a row is not finite.
    unit : float64 ``[c]`` or None
        A power of two for each row: the row was ``unit * y``. None: every unit is one.
    """
    norms = torch.linalg.vector_norm(y, dim=1)
    least, most = torch.aminmax(norms)  # NaN fails both comparisons.
    if float(least) > SMALL and float(most) < LARGE:
        return norms, None
    usual = (norms > SMALL) & (norms < LARGE)
    peak = torch.linalg.vector_norm(y, float("inf"), dim=1)
    finite = torch.isfinite(peak)
    exponent = torch.where(usual | ~finite | (peak == 0), 0, torch.frexp(peak).exponent - 1).to(
        torch.float64
    )
    # In two steps: 2^-exponent alone may overflow.
    half = torch.floor(exponent / 2)
    y.mul_(torch.exp2(-half)[:, None]).mul_(torch.exp2(half - exponent)[:, None])
    norms = torch.where(finite, torch.linalg.vector_norm(y, dim=1), torch.nan)
    return norms, torch.exp2(exponent)


def round_up(norms: Tensor, d: int) -> Tensor:
    """Norms of rows of length ``d``, raised by more than their rounding error."""
    return norms * (1 + 2.0**-44 + d * 2.0**-52)

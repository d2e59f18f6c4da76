"""Per-example gradients of dense layers, never materialised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedsim.rows.alignment import aligned_double, product
from fedsim.rows.dense import BlockRows, DenseRows, Index

__all__ = ["LinearPart", "OuterRows"]


@dataclass(frozen=True, eq=False)
class LinearPart:
    """Gradients of one linear layer: row k is ``outer(delta_k, x_k)``, then ``delta_k``.

    Attributes
    ----------
    x : Tensor ``[..., rows, inputs]``
        The layer's inputs (activations), with a leading ``n`` for those of n clients.
    delta : Tensor ``[..., rows, outputs]``
        Gradients of each example's loss in the layer's outputs.
    bias : bool
        Whether the layer has a bias, which follows the weight in the row.
    """

    x: Tensor
    delta: Tensor
    bias: bool = True

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.x.shape[-2]

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return self.delta.shape[-1] * (self.x.shape[-1] + self.bias)

    def square_norms(self, scale: Tensor | None, center: Tensor | None) -> Tensor:
        """``||(row - center) * scale||^2``, float64 ``[..., rows]``."""
        if scale is None and center is None:
            delta, x = self._squares
            return delta * (x + self.bias)
        x, delta = self._precise
        lead = self.x.shape[:-2]
        q = x.new_ones(*lead, self.size) if scale is None else scale.square()
        squares = self._inner(aligned_double(delta).square_(), x.square(), q)
        if center is None:
            return squares
        cross = self._inner(delta, x, center * q)
        constant = (center.square() * q).sum(-1, keepdim=True)
        return (squares - 2 * cross + constant).clamp_min(0)

    def _inner(self, delta: Tensor, x: Tensor, vector: Tensor) -> Tensor:
        """Inner products of ``outer(delta_k, x_k)``, then ``delta_k``, with ``vector``."""
        outputs, inputs = delta.shape[-1], x.shape[-1]
        weight = vector[..., : outputs * inputs].view(*vector.shape[:-1], outputs, inputs)
        found = (product(delta, aligned_double(weight)) * x).sum(-1)
        if self.bias:
            found += (delta * vector[..., None, outputs * inputs :]).sum(-1)
        return found

    def sums(self, weights: Tensor) -> list[Tensor]:
        """``sum_k weights_k row_k``, float64 ``[..., size]``, in parts one after another."""
        x, delta = self._precise
        delta = aligned_double(delta).mul_(weights[..., None])
        # A row of NaN times zero is NaN: such rows are wiped.
        if weights.is_cuda or not all(bool(torch.isfinite(each).all()) for each in self._squares):
            absent = (weights == 0)[..., None]
            x, delta = aligned_double(x).masked_fill_(absent, 0), delta.masked_fill_(absent, 0)
        weight = product(delta.transpose(-1, -2), x).flatten(-2)
        return [weight, delta.sum(-2)] if self.bias else [weight]

    @cached_property
    def _precise(self) -> tuple[Tensor, Tensor]:
        return aligned_double(self.x), aligned_double(self.delta)

    @cached_property
    def _squares(self) -> tuple[Tensor, Tensor]:
        """Squared norms of every ``delta_k`` and ``x_k``."""
        x, delta = (torch.linalg.vector_norm(each, dim=-1).square_() for each in self._precise)
        return delta, x

    def dense(self) -> Tensor:
        """The rows ``[..., rows, size]``."""
        outer = (self.delta[..., :, None] * self.x[..., None, :]).flatten(-2)
        return torch.cat([outer, self.delta], dim=-1) if self.bias else outer

    def __getitem__(self, index: Index) -> LinearPart:
        """Some rows of some clients."""
        return replace(self, x=self.x[index], delta=self.delta[index])


@dataclass(frozen=True, eq=False)
class OuterRows:
    """Rows of one or more linear layers, one after another in the layout's order.

    Norms cost ``n * (inputs + outputs)`` a layer, or one product with a ``[outputs, inputs]``
    matrix where they are scaled; no gradient of an example is ever formed. All sums are in
    float64.
    """

    parts: tuple[LinearPart, ...]

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.parts[0].count

    @property
    def materialised(self) -> bool:
        """False."""
        return False

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """See `Rows`. A norm whose square leaves float64's range counts as non-finite."""
        found = []
        start = 0
        for part in self.parts:
            own = slice(start, start + part.size)
            found.append(
                part.square_norms(
                    None if scale is None else scale[..., own],
                    None if center is None else center[..., own],
                )
            )
            start += part.size
        squares = torch.stack(found).sum(0)
        return torch.where(torch.isfinite(squares), squares.sqrt(), torch.nan)

    def sum(self, weights: Tensor) -> Tensor:
        """See `Rows`."""
        return torch.cat([own for part in self.parts for own in part.sums(weights)], dim=-1)

    def dense(self) -> Tensor:
        """See `Rows`."""
        return torch.cat([part.dense() for part in self.parts], dim=-1)

    def columns(self, slices: Sequence[slice]) -> BlockRows:
        """See `Rows`; implicit where the columns are whole layers."""
        chosen: list[LinearPart] = []
        start = 0
        for part in self.parts:
            stop = start + part.size
            if any(piece.start <= start and stop <= piece.stop for piece in slices):
                chosen.append(part)
            start = stop
        if chosen and sum(p.size for p in chosen) == sum(s.stop - s.start for s in slices):
            return OuterRows(tuple(chosen))
        return DenseRows(self.dense()).columns(slices)

    def __getitem__(self, index: Index) -> OuterRows:
        """See `BlockRows`."""
        return OuterRows(tuple(part[index] for part in self.parts))

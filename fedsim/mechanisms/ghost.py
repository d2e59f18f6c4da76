"""Per-example gradients of dense layers, never materialised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.mechanisms.rows import DenseRows, Rows

__all__ = ["LinearPart", "OuterRows"]


@dataclass(frozen=True, eq=False)
class LinearPart:
    """Gradients of one linear layer: row k is ``outer(delta_k, x_k)``, then ``delta_k``.

    Attributes
    ----------
    x : Tensor ``[n, inputs]``
        The layer's inputs (activations).
    delta : Tensor ``[n, outputs]``
        Gradients of each example's loss in the layer's outputs.
    bias : bool
        Whether the layer has a bias, which follows the weight in the row.
    """

    x: Tensor
    delta: Tensor
    bias: bool = True

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return self.delta.shape[1] * (self.x.shape[1] + self.bias)

    def square_norms(self, scale: Tensor | None, center: Tensor | None) -> Tensor:
        """``||(row - center) * scale||^2``, float64 ``[n]``."""
        x, delta = self.x.double(), self.delta.double()
        if scale is None and center is None:
            return delta.square().sum(1) * (x.square().sum(1) + self.bias)
        ones = torch.ones(self.size, dtype=torch.float64, device=x.device)
        q = ones if scale is None else scale.square()
        q_weight, q_bias = self._split(q)
        squares = ((delta.square() @ q_weight) * x.square()).sum(1)
        if self.bias:
            squares = squares + delta.square() @ q_bias
        if center is None:
            return squares
        c_weight, c_bias = self._split(center * q)
        cross = ((delta @ c_weight) * x).sum(1)
        if self.bias:
            cross = cross + delta @ c_bias
        return (squares - 2 * cross + (center.square() * q).sum()).clamp_min(0)

    def sum(self, weights: Tensor) -> Tensor:
        """``sum_k weights_k row_k``, float64 ``[size]``."""
        absent = (weights == 0)[:, None]
        x = self.x.double().masked_fill(absent, 0.0)
        delta = self.delta.double().masked_fill(absent, 0.0) * weights[:, None]
        weight = (delta.T @ x).reshape(-1)
        return torch.cat([weight, delta.sum(0)]) if self.bias else weight

    def dense(self) -> Tensor:
        """The rows ``[n, size]``."""
        outer = (self.delta[:, :, None] * self.x[:, None, :]).flatten(1)
        return torch.cat([outer, self.delta], dim=1) if self.bias else outer

    def _split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        cut = self.delta.shape[1] * self.x.shape[1]
        return vector[:cut].reshape(self.delta.shape[1], self.x.shape[1]), vector[cut:]


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
        return len(self.parts[0].x)

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """See `Rows`. A norm whose square leaves float64's range counts as non-finite."""
        squares = torch.zeros(self.count, dtype=torch.float64, device=self.parts[0].x.device)
        start = 0
        for part in self.parts:
            own = slice(start, start + part.size)
            squares += part.square_norms(
                None if scale is None else scale[own], None if center is None else center[own]
            )
            start += part.size
        return torch.where(torch.isfinite(squares), squares.sqrt(), torch.nan)

    def sum(self, weights: Tensor) -> Tensor:
        """See `Rows`."""
        return torch.cat([part.sum(weights) for part in self.parts])

    def dense(self) -> Tensor:
        """See `Rows`."""
        return torch.cat([part.dense() for part in self.parts], dim=1)

    def columns(self, slices: Sequence[slice]) -> Rows:
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

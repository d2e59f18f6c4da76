"""Per-example gradients of linear layers as factors (ghost norms), materialised only if needed.

A norm computed from factors may be a small difference of large numbers: if a row is close to the
centre, or positions of a sequence cancel. Rounding could then make it too small, and the bounded
row would exceed its bound. Each formula therefore also gives the size of its terms (`Squares`), and
a row whose squared norm is not well above their rounding error is materialised
(`OuterRows.measure`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from fedsim.rows.dense import BlockRows, DenseRows, Index, MeasuredRows
from fedsim.rows.norms import norms_
from fedsim.rows.packing import aligned_double, product

# Least ratio of a value to the sum of its terms' sizes at which it is trusted. In a sum of a
# thousand rows each then keeps 23 binary digits.
MIN_RATIO = 2.0**-16
DEPTH = 16
# A squared norm below this may come from products that underflowed.
TINY = 2.0**-900


@dataclass(frozen=True, eq=False)
class Squares:
    """Squared norms of rows, with the sizes of their terms as a measure of accuracy.

    Attributes
    ----------
    values : float64 Tensor ``[..., rows]``
        The squared norms.
    sizes : float64 Tensor ``[..., rows]``, optional
        Sum of the absolute values of each value's terms; by default the values themselves. Up to a
        factor of 2 it is also the square of the terms that a row consists of in a sum of rows.
    depth : int
        Length of the longest chain of additions: the error of a value is below
        ``4 (depth + DEPTH) 2^-52 sizes``.
    """

    values: Tensor
    sizes: Tensor | None = None
    depth: int = 0


@dataclass(frozen=True, eq=False)
class LinearPart:
    """Gradients of one linear layer: row k is ``outer(delta_k, x_k)``, followed by ``delta_k``.

    Attributes
    ----------
    x : Tensor ``[..., rows, inputs]``
        The layer's inputs (activations), with a leading ``n`` for n clients.
    delta : Tensor ``[..., rows, outputs]``
        Gradient of each example's loss by the layer's outputs.
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

    @property
    def cancels(self) -> bool:
        """False: a linear layer's row is one product, whose terms cannot cancel."""
        return False

    def squares(self, scale: Tensor | None, center: Tensor | None) -> Squares:
        """Squared norms ``||(row - center) * scale||^2``, from the factors.

        Without scale and center it is ``||delta||^2 (||x||^2 + 1)``, 1 being the bias. In general
        the square is expanded: with ``q = scale^2``, the terms are ``row^2 . q``,
        ``-2 row . (center q)`` and ``center^2 . q``, where ``row^2`` is an outer product too.
        """
        if scale is None and center is None:
            delta, x = self._squares
            return Squares(delta * (x + self.bias))
        x, delta = self._doubles
        lead = self.x.shape[:-2]
        q = x.new_ones(*lead, self.size) if scale is None else scale.square()
        squares = self._inner(aligned_double(delta).square_(), x.square(), q)
        if center is None:
            return Squares(squares)
        cross = self._inner(delta, x, center * q)
        # Summed axis by axis: the rounding error grows with the length of an axis, not of a row.
        weights, biases = self._split(center.square() * q)
        constant = (weights.sum(-1).sum(-1) + biases.sum(-1)).unsqueeze(-1)
        values = (squares - 2 * cross + constant).clamp_min(0)
        # No cross term is larger than half of both: |2 a b| <= a^2 + b^2.
        return Squares(values, squares + constant, delta.shape[-1] + x.shape[-1])

    def _split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """A vector of a row's length as weight ``[..., outputs, inputs]`` and bias (or empty)."""
        outputs, inputs = self.delta.shape[-1], self.x.shape[-1]
        weight, bias = vector[..., : outputs * inputs], vector[..., outputs * inputs :]
        return weight.view(*vector.shape[:-1], outputs, inputs), bias

    def _inner(self, delta: Tensor, x: Tensor, vector: Tensor) -> Tensor:
        """Inner products of each row, made of these factors, with ``vector``."""
        weight, bias = self._split(vector)
        products = (product(delta, aligned_double(weight)) * x).sum(-1)
        if self.bias:
            products += (delta * bias.unsqueeze(-2)).sum(-1)
        return products

    def sums(self, weights: Tensor) -> list[Tensor]:
        """``sum_k weights_k row_k``, float64 ``[..., size]``, as a list: weight, then bias."""
        x, delta = self._doubles
        delta = aligned_double(delta).mul_(weights[..., None])
        # NaN times zero is NaN: non-finite rows, whose weight is zero, must be wiped.
        if weights.is_cuda or not all(
            bool(torch.isfinite(squares).all()) for squares in self._squares
        ):
            absent = (weights == 0)[..., None]
            x, delta = aligned_double(x).masked_fill_(absent, 0), delta.masked_fill_(absent, 0)
        weight = product(delta.transpose(-1, -2), x).flatten(-2)
        return [weight, delta.sum(-2)] if self.bias else [weight]

    @cached_property
    def _doubles(self) -> tuple[Tensor, Tensor]:
        return aligned_double(self.x), aligned_double(self.delta)

    @cached_property
    def _squares(self) -> tuple[Tensor, Tensor]:
        """Squared norms of every ``delta_k`` and ``x_k``."""
        x, delta = (torch.linalg.vector_norm(factor, dim=-1).square_() for factor in self._doubles)
        return delta, x

    def dense(self) -> Tensor:
        """The rows ``[..., rows, size]``."""
        outer = (self.delta[..., :, None] * self.x[..., None, :]).flatten(-2)
        return torch.cat([outer, self.delta], dim=-1) if self.bias else outer

    def __getitem__(self, index: Index | tuple[int, ...]) -> LinearPart:
        """Some rows of some clients, or one row."""
        return replace(self, x=self.x[index], delta=self.delta[index])


@dataclass(frozen=True, eq=False)
class OuterRows:
    """Rows of one or more linear layers, one after another in the layout's order.

    Norms take ``n * (inputs + outputs)`` operations a layer, or one product with a
    ``[outputs, inputs]`` matrix if they are scaled. Gradients of examples are not formed, except
    for rows whose norm would be inaccurate. All sums are in float64.
    """

    layers: tuple[LinearPart, ...]

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.layers[0].count

    @property
    def _layer_columns(self) -> list[tuple[LinearPart, slice]]:
        """Each layer with its columns in a row."""
        ends = accumulate(layer.size for layer in self.layers)
        return [(p, slice(end - p.size, end)) for p, end in zip(self.layers, ends, strict=True)]

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """Norms ``[..., rows]``; one whose square leaves float64's range counts as non-finite."""
        measured = self.measure(scale, center)
        return DenseRows(self.dense()).norms(scale, center) if measured is None else measured.norms

    def measure(
        self, scale: Tensor | None = None, center: Tensor | None = None
    ) -> MeasuredRows | None:
        """Norms from the factors; rows for which these would be inaccurate are materialised.

        None on a GPU if terms may cancel: it would have to be read back which rows these are.
        """
        cancels = center is not None or any(layer.cancels for layer in self.layers)
        if cancels and self.layers[0].x.is_cuda:
            return None
        layer_squares = []
        for layer, columns in self._layer_columns:
            parts = (None if v is None else v[..., columns] for v in (scale, center))
            layer_squares.append(layer.squares(*parts))
        values = torch.stack([squares.values for squares in layer_squares]).sum(0)
        norms = torch.where(torch.isfinite(values), values.sqrt(), torch.nan)
        doubtful: list[list[int]] = []
        if cancels:
            sizes = torch.stack(
                [s.values if s.sizes is None else s.sizes for s in layer_squares]
            ).sum(0)
            depth = max(squares.depth for squares in layer_squares) + DEPTH
            min_ratio = max(MIN_RATIO, 2.0**22 * depth * 2.0**-52)
            # A row with NaN is not doubtful: it contributes nothing.
            doubted = torch.isfinite(sizes) & (sizes > 0) & ~(values >= min_ratio * sizes)
            doubtful = doubted.nonzero().tolist()
        if scale is not None or self.layers[0].x.dtype == torch.float64:
            # Such squares may have lost digits by underflow, and count as non-finite. Products of
            # float32 numbers cannot be that small.
            norms = norms.masked_fill((values > 0) & (values < TINY), torch.nan)
        exact_rows = {}
        for index in map(tuple, doubtful):
            row = self._row(index).double()
            row = row if center is None else row - center[index[:-1]]
            row = row if scale is None else row * scale[index[:-1]]
            length, power = norms_(row)
            norms[index], exact_rows[index] = length * power, row * power
        return MeasuredRows(self, norms, scale, center, exact_rows)

    def _row(self, index: tuple[int, ...]) -> Tensor:
        """One row ``[d]``; from copies, so that alignment, and with it bits, cannot depend on k."""
        parts = [
            replace(p, x=p.x[index].clone(), delta=p.delta[index].clone()) for p in self.layers
        ]
        return torch.cat([layer.dense() for layer in parts], dim=-1)

    def sum(self, weights: Tensor) -> Tensor:
        """``sum_k weights_k row_k``, float64 ``[..., d]``: one matrix product a layer."""
        return torch.cat([piece for layer in self.layers for piece in layer.sums(weights)], dim=-1)

    def dense(self) -> Tensor:
        """The rows themselves, ``[..., rows, d]``."""
        return torch.cat([layer.dense() for layer in self.layers], dim=-1)

    def columns(self, slices: Sequence[slice]) -> BlockRows:
        """The same rows over these columns only; still factored if they are whole layers."""
        layers = [
            layer
            for layer, columns in self._layer_columns
            if any(piece.start <= columns.start and columns.stop <= piece.stop for piece in slices)
        ]
        if layers and sum(p.size for p in layers) == sum(s.stop - s.start for s in slices):
            return OuterRows(tuple(layers))
        return DenseRows(self.dense()).columns(slices)

    def __getitem__(self, index: Index) -> OuterRows:
        """Some rows of some clients, or of one."""
        return OuterRows(tuple(layer[index] for layer in self.layers))

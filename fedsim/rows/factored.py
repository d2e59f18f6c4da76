"""Per-example gradients of dense layers, never materialised where that is certain to be right.

A norm from factors may be a small difference of large numbers: of a row and a centre that lie
close together, of positions that cancel. Rounding then makes it too small, and the row would be
left longer than its bound. So each formula also says what it is a difference of (`Squares`), and
a row whose square is not well above the rounding of that is written out (`OuterRows.measure`).
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

# Of its sizes, a value that is believed: a sum of a thousand rows then keeps 23 digits of each.
LEAST = 2.0**-16
DEPTH = 16
# Products of normal numbers whose squares are below this may not be normal themselves.
TINY = 2.0**-900


@dataclass(frozen=True, eq=False)
class Squares:
    """Squared norms of rows, and what they are differences of.

    Attributes
    ----------
    values : float64 Tensor ``[..., rows]``
    sizes : float64 Tensor ``[..., rows]``, optional
        Sum of the magnitudes of what a value is the sum of, and, but for a factor of 2, the
        square of those of which a row in a sum of rows is made; by default the values.
    depth : int
        Numbers that are added one after another: the error of a value is below
        ``4 (depth + DEPTH) 2^-52 sizes``.
    """

    values: Tensor
    sizes: Tensor | None = None
    depth: int = 0


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

    @property
    def cancels(self) -> bool:
        """Whether a row is a sum in which much may cancel."""
        return False

    def squares(self, scale: Tensor | None, center: Tensor | None) -> Squares:
        """``||(row - center) * scale||^2``."""
        if scale is None and center is None:
            delta, x = self._squares
            return Squares(delta * (x + self.bias))
        x, delta = self._precise
        lead = self.x.shape[:-2]
        q = x.new_ones(*lead, self.size) if scale is None else scale.square()
        squares = self._inner(aligned_double(delta).square_(), x.square(), q)
        if center is None:
            return Squares(squares)
        cross = self._inner(delta, x, center * q)
        # Layer by layer of sums: rounding grows with the length of one, not with that of a row.
        weights, biases = self._split(center.square() * q)
        constant = (weights.sum(-1).sum(-1) + biases.sum(-1)).unsqueeze(-1)
        values = (squares - 2 * cross + constant).clamp_min(0)
        # No cross term is larger than half of both: |2 a b| <= a^2 + b^2.
        return Squares(values, squares + constant, delta.shape[-1] + x.shape[-1])

    def _split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """A vector like a row, as ``[..., outputs, inputs]`` and the bias's (empty without)."""
        outputs, inputs = self.delta.shape[-1], self.x.shape[-1]
        weight, bias = vector[..., : outputs * inputs], vector[..., outputs * inputs :]
        return weight.view(*vector.shape[:-1], outputs, inputs), bias

    def _inner(self, delta: Tensor, x: Tensor, vector: Tensor) -> Tensor:
        """Inner products of ``outer(delta_k, x_k)``, then ``delta_k``, with ``vector``."""
        weight, bias = self._split(vector)
        products = (product(delta, aligned_double(weight)) * x).sum(-1)
        if self.bias:
            products += (delta * bias.unsqueeze(-2)).sum(-1)
        return products

    def sums(self, weights: Tensor) -> list[Tensor]:
        """``sum_k weights_k row_k``, float64 ``[..., size]``, in parts one after another."""
        x, delta = self._precise
        delta = aligned_double(delta).mul_(weights[..., None])
        # A row of NaN times zero is NaN: such rows are wiped.
        if weights.is_cuda or not all(
            bool(torch.isfinite(squares).all()) for squares in self._squares
        ):
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
        x, delta = (torch.linalg.vector_norm(factor, dim=-1).square_() for factor in self._precise)
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
    def _places(self) -> list[tuple[LinearPart, slice]]:
        """Each layer, and its columns of a row."""
        ends = accumulate(layer.size for layer in self.parts)
        return [(p, slice(end - p.size, end)) for p, end in zip(self.parts, ends, strict=True)]

    def norms(self, scale: Tensor | None = None, center: Tensor | None = None) -> Tensor:
        """Norms ``[..., rows]``; one whose square leaves float64's range counts as non-finite."""
        measured = self.measure(scale, center)
        return DenseRows(self.dense()).norms(scale, center) if measured is None else measured.norms

    def measure(
        self, scale: Tensor | None = None, center: Tensor | None = None
    ) -> MeasuredRows | None:
        """The norms from the factors, and written out the rows for which that is not certain.

        None on a GPU where much may cancel: which rows are doubtful would have to be read back.
        """
        cancels = center is not None or any(layer.cancels for layer in self.parts)
        if cancels and self.parts[0].x.is_cuda:
            return None
        every = []
        for layer, columns in self._places:
            parts = (None if v is None else v[..., columns] for v in (scale, center))
            every.append(layer.squares(*parts))
        values = torch.stack([squares.values for squares in every]).sum(0)
        norms = torch.where(torch.isfinite(values), values.sqrt(), torch.nan)
        doubtful: list[list[int]] = []
        if cancels:
            sizes = torch.stack([s.values if s.sizes is None else s.sizes for s in every]).sum(0)
            depth = max(squares.depth for squares in every) + DEPTH
            least = max(LEAST, 2.0**22 * depth * 2.0**-52)
            # NaN is not finite, and no doubt: such a row contributes nothing.
            doubted = torch.isfinite(sizes) & (sizes > 0) & ~(values >= least * sizes)
            doubtful = doubted.nonzero().tolist()
        if scale is not None or self.parts[0].x.dtype == torch.float64:
            # Squares that have lost digits. No product of float32 numbers comes as far.
            norms = norms.masked_fill((values > 0) & (values < TINY), torch.nan)
        written = {}
        for index in map(tuple, doubtful):
            row = self._row(index).double()
            row = row if center is None else row - center[index[:-1]]
            row = row if scale is None else row * scale[index[:-1]]
            length, power = norms_(row)
            norms[index], written[index] = length * power, row * power
        return MeasuredRows(self, norms, scale, center, written)

    def _row(self, index: tuple[int, ...]) -> Tensor:
        """One row ``[d]``, from copies, which lie where the allocator puts everything."""
        parts = [replace(p, x=p.x[index].clone(), delta=p.delta[index].clone()) for p in self.parts]
        return torch.cat([layer.dense() for layer in parts], dim=-1)

    def sum(self, weights: Tensor) -> Tensor:
        """``sum_k weights_k row_k``, float64 ``[..., d]``: one matrix product a layer."""
        return torch.cat([piece for layer in self.parts for piece in layer.sums(weights)], dim=-1)

    def dense(self) -> Tensor:
        """The rows themselves, ``[..., rows, d]``."""
        return torch.cat([layer.dense() for layer in self.parts], dim=-1)

    def columns(self, slices: Sequence[slice]) -> BlockRows:
        """The same rows over these columns only; not written out where those are whole layers."""
        chosen = [
            layer
            for layer, place in self._places
            if any(piece.start <= place.start and place.stop <= piece.stop for piece in slices)
        ]
        if chosen and sum(p.size for p in chosen) == sum(s.stop - s.start for s in slices):
            return OuterRows(tuple(chosen))
        return DenseRows(self.dense()).columns(slices)

    def __getitem__(self, index: Index) -> OuterRows:
        """Some rows of some clients, or of one."""
        return OuterRows(tuple(layer[index] for layer in self.parts))

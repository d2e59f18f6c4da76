"""Gradients of a block's clients, in the forms that the paths produce.

Rows are packed (`fedsim.rows.packing`): ``D`` is ``d`` plus gaps of zeros.

The weight gradient of a dense layer is a product of two factors, the layer's inputs and the
gradients of its outputs. It is as large as the layer, while its factors are only as large as a
batch. A plain step does nothing but subtract it. So the layered path returns the factors, and the
step subtracts their product directly from the weights (`FactoredGradient.subtract_from`): the
gradient is never written to memory. Norms and distances follow from the factors as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.clients.base import DenseGradient, Gradient, require_slice
from fedsim.rows.packing import Packing, aligned_empty, product

WIDE = 16  # columns from which on libraries multiply as they do large matrices
PIECEWISE_BYTES = 2**17  # bytes of a client's matrix above which clients go one by one (`_pieces`)


class BlockOfOne(Mapping[str, Tensor]):
    """One client's tensors ``[*shape]`` by name, viewed as a block of one: ``[1, *shape]``."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.named = named

    def __getitem__(self, name: str) -> Tensor:
        return self.named[name].unsqueeze(0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)


class RowViews(NamedTuple):
    """One client's packed row ``[1, D]``, while a model's parameters are views of it.

    Attributes
    ----------
    row : Tensor ``[1, D]``
    views, gradients : list of Tensor ``[*shape]``
        Views and gradients of the parameters that have a gradient.
    """

    row: Tensor
    views: list[Tensor]
    gradients: list[Tensor]


@dataclass(frozen=True)
class ParameterGradients:
    """Gradients written out parameter by parameter, as autograd gives them.

    Attributes
    ----------
    parts : mapping of name to Tensor ``[n, *shape]``
        A parameter that is missing has no gradient.
    packing : Packing
    row_views : RowViews, optional
        The row at which they were taken, if the model's parameters are views of it.
    """

    by_name: Mapping[str, Tensor]
    packing: Packing
    row_views: RowViews | None = None

    def __getitem__(self, clients: slice) -> ParameterGradients:
        """Gradients of these clients."""
        some = require_slice(clients)
        return ParameterGradients(
            {k: gradient[some] for k, gradient in self.by_name.items()}, self.packing
        )

    def dense(self) -> Tensor:
        """Packed rows ``[n, D]`` of the gradients."""
        first = next(iter(self.by_name.values()))
        out = first.new_zeros(len(first), self.packing.width)
        for name, gradient in self.by_name.items():
            out[:, self.packing.slices[name]].view(gradient.shape).copy_(gradient)
        return out

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """Subtract ``rate`` times the gradients, by one multiply-add for each parameter."""
        views = self.row_views
        if out is None and views is not None and theta is views.row:
            # One launch for all parameters, written through the views straight into the row.
            torch._foreach_add_(views.views, views.gradients, alpha=-float(rate))
            return
        into = theta if out is None else out
        for name, packed in self.packing.slices.items():
            gradient = self.by_name.get(name)
            if gradient is None:
                into[:, packed] = theta[:, packed]
                continue
            old, new = theta[:, packed].view(gradient.shape), into[:, packed].view(gradient.shape)
            torch.addcmul(
                old, gradient, rate.view(-1, *[1] * (gradient.dim() - 1)), value=-1, out=new
            )

    def distance(self, other: Gradient) -> Tensor:
        """L2 distances ``[n]``, computed parameter by parameter."""
        # A model that branches may give one of the two a gradient that the other lacks.
        if not isinstance(other, ParameterGradients) or {*self.by_name} != {*other.by_name}:
            return DenseGradient(self.dense()).distance(other)
        return _joint_norms(part - other.by_name[name] for name, part in self.by_name.items())

    def norms(self) -> Tensor:
        """L2 norms ``[n]``, from the norms of the parameters' gradients."""
        return _joint_norms(self.by_name.values())

    def scaled(self, factors: Tensor) -> ParameterGradients:
        """The gradients times ``factors [n]``."""
        parts = {
            name: part * factors.view(-1, *[1] * (part.dim() - 1))
            for name, part in self.by_name.items()
        }
        return ParameterGradients(parts, self.packing)

    def max_abs(self) -> Tensor:
        """Largest absolute coordinate, ``[n]``."""
        return torch.stack(
            [DenseGradient(gradient.flatten(1)).max_abs() for gradient in self.by_name.values()]
        ).amax(0)


def _joint_norms(parts: Iterable[Tensor]) -> Tensor:
    """L2 norms ``[n]`` of rows that consist of these parts ``[n, *shape]``."""
    norms = [torch.linalg.vector_norm(part.flatten(1), dim=1) for part in parts]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return norm


@dataclass(frozen=True)
class LayerFactors:
    """Factors of one dense layer's gradient: ``delta^T x`` is its weight gradient.

    Attributes
    ----------
    x : Tensor ``[..., B, in]``
        Inputs of the layer, of one client or of ``n``.
    delta : Tensor ``[..., B, out]``
        Gradients of the weighted loss with respect to its outputs.
    weight, bias : slice or None
        Slices of the parameters in a packed row; None for one that is not trained.
    """

    x: Tensor
    delta: Tensor
    weight: slice | None
    bias: slice | None

    def __getitem__(self, clients: slice | None) -> LayerFactors:
        """Factors of these clients; with None, one client's factors as a block of one."""
        return LayerFactors(self.x[clients], self.delta[clients], self.weight, self.bias)


def distance_between(square: Tensor, other: Tensor, inner: Tensor) -> Tensor:
    """L2 distance of two gradients from their squared norms and their inner product, ``[...]``.

    The relative error grows with ``(|gradient| / distance)^2``, far too small to affect a step.
    """
    return (square + other - 2 * inner).clamp_(min=0).sqrt_()


@dataclass(frozen=True)
class FactoredGradient:
    """Gradients of a chain of dense layers, as factors.

    Attributes
    ----------
    factors : sequence of Factor
    packing : Packing
    """

    factors: Sequence[LayerFactors]
    packing: Packing

    def __getitem__(self, clients: slice) -> FactoredGradient:
        """Gradients of these clients."""
        some = require_slice(clients)
        return FactoredGradient([factor[some] for factor in self.factors], self.packing)

    def dense(self) -> Tensor:
        """Packed rows ``[n, D]`` of the gradients, multiplied out."""
        first = self.factors[0].delta
        out = first.new_zeros(len(first), self.packing.width)
        for factor in self.factors:
            n, _, outputs = factor.delta.shape
            if factor.weight is not None:
                view = out[:, factor.weight].view(n, outputs, -1)
                torch.bmm(factor.delta.transpose(1, 2), factor.x, out=view)
            if factor.bias is not None:
                out[:, factor.bias] = factor.delta.sum(1)
        return out

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """Subtract ``rate`` times the products of the factors, without forming a gradient."""
        for factor in self.factors:
            n, B, outputs = factor.delta.shape
            scaled = aligned_empty(theta, n, B, outputs)
            torch.mul(factor.delta, rate.view(n, 1, 1), out=scaled)
            if factor.weight is not None:
                old = theta[:, factor.weight].view(n, outputs, -1)
                if out is None:
                    old.baddbmm_(scaled.transpose(1, 2), factor.x, alpha=-1)
                else:
                    new = out[:, factor.weight].view(n, outputs, -1)
                    for k in _pieces(new):
                        # This first copies `old` to `new`: by pieces, `new` is then in the cache.
                        torch.baddbmm(
                            old[k], scaled[k].transpose(1, 2), factor.x[k], alpha=-1, out=new[k]
                        )
            if factor.bias is not None:
                into = (theta if out is None else out)[:, factor.bias]
                torch.sub(theta[:, factor.bias], _sums_of_examples(scaled), out=into)

    def distance(self, other: Gradient) -> Tensor:
        """L2 distances ``[n]``, from inner products of the factors."""
        if not isinstance(other, FactoredGradient):
            return DenseGradient(self.dense()).distance(other)
        return distance_between(self._inner(self), other._inner(other), self._inner(other))

    def norms(self) -> Tensor:
        """L2 norms ``[n]``, from inner products of the factors."""
        return self._inner(self).clamp_(min=0).sqrt_()

    def _inner(self, other: FactoredGradient) -> Tensor:
        """Inner product of the two gradients, ``[n]``.

        It is the sum over pairs of examples of ``(x_i . x_j) (delta_i . delta_j)``, added up over
        the layers first: no weight gradient is formed.
        """
        total: Tensor | None = None
        for factor, other_factor in zip(self.factors, other.factors, strict=True):
            products = product(factor.delta, other_factor.delta.transpose(-1, -2))
            if factor.weight is not None:
                inputs = product(factor.x, other_factor.x.transpose(-1, -2))
                # A bias is the weight of an input that is always 1.
                products *= inputs if factor.bias is None else inputs.add_(1)
            total = products if total is None else total.add_(products)
        assert total is not None
        return total.flatten(1).sum(1)

    def scaled(self, factors: Tensor) -> FactoredGradient:
        """The gradients times ``factors [n]``, by scaling the output gradients."""
        scaled = []
        for factor in self.factors:
            delta = aligned_empty(factor.delta, *factor.delta.shape)
            torch.mul(factor.delta, factors.view(-1, 1, 1), out=delta)
            scaled.append(replace(factor, delta=delta))
        return FactoredGradient(scaled, self.packing)

    def max_abs(self) -> Tensor:
        """Upper bound of the coordinates from the factors: ``max_o sum_b |delta_bo| max |x|``."""
        bounds = []
        for factor in self.factors:
            outputs = factor.delta.abs().sum(1).amax(1)
            # At least 1, the input of the bias.
            bounds.append(outputs * factor.x.flatten(1).abs().amax(1).clamp_(min=1))
        return torch.stack(bounds).amax(0)


def _sums_of_examples(deltas: Tensor) -> Tensor:
    """Sums over the examples ``[n, out]`` of ``deltas [n, B, out]``."""
    if deltas.is_cuda:
        return deltas.sum(1)
    # By products with ones, whose order of sums is known: that of `sum` depends on the number of
    # outputs. The ones are not expanded, since `bmm` would copy expanded ones for each client.
    ones = deltas.new_ones(len(deltas), deltas.shape[1], WIDE)
    return torch.bmm(deltas.transpose(1, 2), ones)[..., 0]


def _pieces(block: Tensor) -> list[slice]:
    """One client at a time where a client's matrix is large, else all at once."""
    if block.is_cuda or block[0].numel() * block.element_size() < PIECEWISE_BYTES:
        return [slice(None)]
    return [slice(k, k + 1) for k in range(len(block))]

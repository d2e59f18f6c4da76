"""What a path hands to a local algorithm: the gradient of each client in a block.

Rows are packed (`fedsim.clients.packing`): ``D`` is ``d`` plus gaps of zeros.

A stacked path never has to write a weight gradient down: it keeps the two factors (inputs
and output gradients of each layer) and folds them into whatever they are subtracted from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedsim.clients.packing import Packing, aligned_empty

__all__ = ["Dense", "Factor", "Factored", "Gradient"]


class Gradient(Protocol):
    """Gradients of ``n`` clients, each at its own point."""

    def dense(self) -> Tensor:
        """The gradients as ``[n, D]``; the caller may overwrite the tensor."""

    def subtract_from(self, theta: Tensor, rate: Tensor) -> None:
        """``theta [n, D] -= rate [n] * gradient``, in place."""


@dataclass(frozen=True)
class Dense:
    """Gradients written out, ``[n, D]``."""

    values: Tensor

    def dense(self) -> Tensor:
        """The tensor itself."""
        return self.values

    def subtract_from(self, theta: Tensor, rate: Tensor) -> None:
        """One fused multiply-add over the block."""
        theta.addcmul_(self.values, rate.unsqueeze(1), value=-1)


@dataclass(frozen=True)
class Factor:
    """One dense layer's share: ``delta^T x`` is its weight gradient.

    Attributes
    ----------
    x : Tensor ``[n, B, in]``
        Inputs of the layer.
    delta : Tensor ``[n, B, out]``
        Gradients of the loss with respect to its outputs, weighted.
    weight, bias : slice or None
        Where the parameters lie in a packed row; None for one that is not trained.
    """

    x: Tensor
    delta: Tensor
    weight: slice | None
    bias: slice | None


@dataclass(frozen=True)
class Factored:
    """Gradients of stacked dense layers, as factors.

    Attributes
    ----------
    factors : sequence of Factor
    packing : Packing
    """

    factors: Sequence[Factor]
    packing: Packing

    def dense(self) -> Tensor:
        """Write the gradients out, ``[n, D]``."""
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

    def subtract_from(self, theta: Tensor, rate: Tensor) -> None:
        """Fold the factors into ``theta`` without a gradient in between."""
        for factor in self.factors:
            n, B, outputs = factor.delta.shape
            scaled = aligned_empty(theta, n, B, outputs)
            torch.mul(factor.delta, rate.view(n, 1, 1), out=scaled)
            if factor.weight is not None:
                view = theta[:, factor.weight].view(n, outputs, -1)
                view.baddbmm_(scaled.transpose(1, 2), factor.x, alpha=-1)
            if factor.bias is not None:
                theta[:, factor.bias].sub_(scaled.sum(1))

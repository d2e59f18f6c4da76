"""Masks of dropout as inputs of a model: drawn before the pass, at counters, each client's own.

torch's generator serves one client at a time, and a captured step would repeat its draws. Here a
mask is a tensor with a row for each example and goes through `torch.func` beside the example's
inputs (`NamedTensors`), so that whatever takes a batch takes its masks with it. It is a function of
the client's key, the round, the step and the example's place in the batch, and so the same whoever
shares the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from fedsim.kernels.device_normals import uniforms_at
from fedsim.named_tensors import NamedTensors

# No input of a user's has such a name: it could not be an argument of a forward.
_MASK, _ONLY_INPUT = "mask ", ""


class MaskedProduct(nn.Module):
    """Dropout by a mask among the inputs; without one, as in evaluation, it does nothing.

    Parameters
    ----------
    p : float
        Probability with which a number is dropped.
    inplace : bool
        Whether it writes into its argument, which the forward may use again.
    shape : sequence of int
        Shape of one example's mask.

    Attributes
    ----------
    place : int
        Number of its mask.
    """

    place: int

    def __init__(self, p: float, inplace: bool, shape: Sequence[int]) -> None:
        super().__init__()
        self.p, self.inplace, self.shape = p, inplace, tuple(shape)

    def forward(self, x: Tensor, inputs: Tensor | None) -> Tensor:
        """The numbers ``x`` that are kept, divided by the probability with which they are."""
        tensors = inputs.tensors if isinstance(inputs, NamedTensors) else {}
        mask = tensors.get(f"{_MASK}{self.place}")
        if mask is None:
            return x
        return x.mul_(mask) if self.inplace else x * mask


class WithoutMasks(nn.Module):
    """The inputs as the model's own code takes them."""

    def forward(self, inputs: Tensor) -> Tensor:
        """One tensor, or the user's named ones."""
        if not isinstance(inputs, NamedTensors):
            return inputs
        own = {name: x for name, x in inputs.tensors.items() if not name.startswith(_MASK)}
        return own.get(_ONLY_INPUT, NamedTensors._of(own))


def masked_products(model: nn.Module) -> list[MaskedProduct]:
    """A model's products with masks, in the order of their masks."""
    return [module for module in model.modules() if isinstance(module, MaskedProduct)]


def with_masks(
    model: nn.Module, x: Tensor, key: Tensor, counter: Tensor, dtype: torch.dtype, chunk: int = 0
) -> Tensor:
    """Inputs ``[n, B, ...]`` with a mask ``[n, B, *shape]`` for each of a model's products.

    Parameters
    ----------
    model : nn.Module
    x : Tensor ``[n, B, ...]``
    key : int64 Tensor ``[n, 2]``
    counter : int64 Tensor ``[n, 3]``
        Each client's own, as of `uniforms_at`.
    dtype : torch.dtype
        The masks'.
    chunk : int
        Number of these examples' chunk, if a batch is taken in several of them.
    """
    products, (n, batch) = masked_products(model), x.shape[:2]
    if not products:
        return x
    sizes = [batch * prod(product.shape) for product in products]
    drawn = torch.split(uniforms_at(key, counter, sum(sizes), chunk), sizes, dim=1)
    masks = {
        f"{_MASK}{product.place}": (uniform >= product.p)
        .to(dtype)
        .div_(1 - product.p or 1.0)
        .view(n, batch, *product.shape)
        for product, uniform in zip(products, drawn, strict=True)
    }
    own = x.tensors if isinstance(x, NamedTensors) else {_ONLY_INPUT: x}
    return NamedTensors._of(own | masks)

"""The func path of models with dropout: masks are drawn at counters, each client's its own.

torch's generator serves one client at a time, and a captured step would repeat its draws. Here each
dropout layer of the graph that was read is replaced by a product with a mask, which is drawn before
the pass for all clients: a function of the client's key, the round and the step, and so the same
whoever shares the block. They are other masks than those of the path `plain`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedsim.clients.base import DenseGradient, Gradient
from fedsim.kernels.device_normals import uniforms_at
from fedsim.models.parameters import call_with
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.paths.func import FuncPath
from fedsim.training.paths.recurrent import with_products
from fedsim.training.structure.reading import Structure
from fedsim.training.structure.values import Batched


class MaskedProduct(nn.Module):
    """Dropout by a mask that it is given; without one, as in evaluation, it does nothing.

    Parameters
    ----------
    p : float
        Probability with which a number is dropped.
    inplace : bool
        Whether it writes into its inputs, which the forward may use again.
    shape : sequence of int
        Shape of one example's inputs.
    """

    def __init__(self, p: float, inplace: bool, shape: Sequence[int]) -> None:
        super().__init__()
        self.p, self.inplace, self.shape = p, inplace, tuple(shape)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The numbers that are kept, divided by the probability with which they are."""
        if self.mask is None:
            return x
        return x.mul_(self.mask) if self.inplace else x * self.mask


@dataclass(frozen=True)
class DropoutPath(FuncPath):
    """`FuncPath` of a model whose only draws are those of dropout layers, called once each."""

    @classmethod
    def lowered(cls, structure: Structure, packing: Packing, loss: Loss) -> Self | None:
        """The path of a model that was read; None if one of its dropouts is no such layer."""
        layers: dict[str, MaskedProduct] = {}
        for node in structure.module.graph.nodes:
            if node.op != "call_module":
                continue
            module, value = structure.module.get_submodule(str(node.target)), node.meta["value"]
            if type(module) is not nn.Dropout:
                continue
            if node.target in layers or not isinstance(value, Batched) or value.axis != 0:
                return None
            shape = value.like.shape[1:]
            layers[str(node.target)] = MaskedProduct(module.p, module.inplace, shape)
        if not layers:
            return None
        # A copy of the containers: all other layers stay those of the graph that was read.
        own = [module for module in structure.module.modules() if not [*module.children()]]
        shared = [*structure.module.parameters(), *structure.module.buffers(), *own]
        model = copy.deepcopy(structure.module, {id(one): one for one in shared})
        for target, layer in layers.items():
            parent, _, child = target.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
        return cls(with_products(model) or model, packing, loss)

    @property
    def _layers(self) -> list[MaskedProduct]:
        return [module for module in self.model.modules() if isinstance(module, MaskedProduct)]

    @property
    def _gradients(self) -> Any:
        return vmap(grad(self._masked_loss, has_aux=True))

    def gradient(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        draws: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Gradient, Tensor]:
        """Gradients and losses; without ``draws``, key and counter of each client, nothing drops.

        On a CPU clients go one after another, so that a client's bits do not depend on its block.
        """
        masks = [] if draws is None else self._masks(*draws, weight.shape[1], theta.dtype)
        gradients, losses = torch.zeros_like(theta), torch.empty_like(weight)
        n = len(theta)
        parts = [slice(0, n)] if theta.is_cuda else [slice(k, k + 1) for k in range(n)]
        for part in parts:
            point, inputs = self._rows_of(theta, part), self._rows_of(x, part)
            own = [self._rows_of(mask, part) for mask in masks]
            named, losses[part] = self._gradients(
                self.packing.named(point), inputs, y[part], weight[part], own
            )
            for name, columns in self.packing.slices.items():
                gradients[part, columns] = named[name].flatten(1)
        return DenseGradient(gradients), losses

    def _masks(self, key: Tensor, counter: Tensor, batch: int, dtype: torch.dtype) -> list[Tensor]:
        """A mask ``[n, B, *shape]`` for each layer, from one stream for each client."""
        layers = self._layers
        sizes = [batch * prod(layer.shape) for layer in layers]
        drawn = torch.split(uniforms_at(key, counter, sum(sizes)), sizes, dim=1)
        return [
            (uniform >= layer.p)
            .to(dtype)
            .div_(1 - layer.p or 1.0)
            .view(len(key), batch, *layer.shape)
            for layer, uniform in zip(layers, drawn, strict=True)
        ]

    def _masked_loss(
        self,
        named: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        masks: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        layers = self._layers
        try:
            for layer, mask in zip(layers, masks, strict=False):  # no masks, or one for each
                layer.mask = mask
            losses = self.loss(call_with(self.model, named, x), y)
        finally:
            for layer in layers:
                layer.mask = None
        return (losses * weight).sum(), losses

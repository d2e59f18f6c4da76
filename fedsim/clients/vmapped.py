"""The func path: `torch.func.vmap` of a gradient over clients, for any model it can take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsim.clients.gradients import Dense, Gradient
from fedsim.clients.losses import Loss
from fedsim.clients.packing import Packing

__all__ = ["FuncPath"]


@dataclass(frozen=True)
class FuncPath:
    """`torch.func`: on a GPU one call for the whole block."""

    model: nn.Module
    packing: Packing
    loss: Loss

    name = "func"

    def _loss(
        self, named: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        each = self.loss(functional_call(self.model, named, (x,)), y)
        return (each * weight).sum(), each

    @cached_property
    def _gradients(self) -> Any:
        return vmap(grad(self._loss, has_aux=True))

    @cached_property
    def _outputs(self) -> Any:
        return vmap(lambda named, x: functional_call(self.model, named, (x,)))

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Gradient, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``."""
        gradients, losses = torch.zeros_like(theta), torch.empty_like(weight)
        for part in self._parts(theta):
            named, losses[part] = self._gradients(
                self.packing.named(theta[part].clone()), x[part].clone(), y[part], weight[part]
            )
            for name, inside in self.packing.slices.items():
                gradients[part, inside] = named[name].flatten(1)
        return Dense(gradients), losses

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model ``[n, B, ...]`` at ``theta [n, D]``."""
        return torch.cat(
            [
                self._outputs(self.packing.named(theta[part].clone()), x[part].clone())
                for part in self._parts(theta)
            ]
        )

    def _parts(self, theta: Tensor) -> list[slice]:
        """The whole block on a GPU; one client after another on a CPU.

        There a vmapped product leaves it to its library how to align what lies in between,
        and a client's bits would depend on its place in the block.
        """
        if theta.device.type != "cpu":
            return [slice(None)]
        return [slice(k, k + 1) for k in range(len(theta))]

"""The func path: `torch.func.vmap` of a gradient over clients, for any model it can take.

On a CPU a client's bits must not depend on its position in a block. Without care they would:
vectorised loops compute the last few numbers of a tensor differently, and products pick their
kernel by alignment. If every matrix of a block starts on a cache line and fills whole lines
(`FuncPath.aligned`), the block goes in one call, with batches padded to whole lines; otherwise
clients go one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fedsim.clients.base import DenseGradient, Gradient
from fedsim.models.parameters import call_with
from fedsim.named_tensors import each
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss

_LONG_REGISTERS = torch.backends.cpu.get_cpu_capability() == "AVX512"


@dataclass(frozen=True)
class FuncPath:
    """`torch.func`: one call for the whole block, on a GPU and for dense models on a CPU."""

    model: nn.Module
    packing: Packing
    loss: Loss

    name = "func"

    def _loss(
        self, named: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses = self.loss(call_with(self.model, named, x), y)
        return (losses * weight).sum(), losses

    @property
    def _gradients(self) -> Any:  # not cached: it cannot be pickled
        return vmap(grad(self._loss, has_aux=True))

    @property
    def _outputs(self) -> Any:
        return vmap(lambda named, x: call_with(self.model, named, x))

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Gradient, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``."""
        gradients, losses = torch.zeros_like(theta), torch.empty_like(weight)
        B = weight.shape[1]
        x, y = each(self._padded, x), self._padded(y)
        weight = F.pad(weight, (0, x.shape[1] - B))
        for clients in self._parts(theta):
            point, inputs = self._rows_of(theta, clients), self._rows_of(x, clients)
            named, client_losses = self._gradients(
                self.packing.named(point), inputs, y[clients], weight[clients]
            )
            losses[clients] = client_losses[:, :B]
            for name, columns in self.packing.slices.items():
                gradients[clients, columns] = named[name].flatten(1)
        return DenseGradient(gradients), losses

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model ``[n, B, ...]`` at ``theta [n, D]``."""
        B = x.shape[1]
        x = each(self._padded, x)
        return torch.cat(
            [
                self._outputs(
                    self.packing.named(self._rows_of(theta, clients)), self._rows_of(x, clients)
                )[:, :B]
                for clients in self._parts(theta)
            ]
        )

    @cached_property
    def aligned(self) -> bool:
        """Whether every matrix of a block starts on a cache line, if batches are padded to lines.

        Then the library's kernels, and a client's bits, do not depend on its position in a block.
        """
        for module in self.model.modules():
            parameters = list(module.parameters(recurse=False))
            # A layer of one input or output is a vector: alone it takes another kernel.
            if parameters and not (
                type(module) is nn.Linear
                and module.weight.numel() % self.packing.per_line == 0
                and min(module.weight.shape) > 1
            ):
                return False
        return True

    def _padded(self, batch: Tensor) -> Tensor:
        """``[n, B, ...]`` padded to whole cache lines, or pairs, by copies of the first example."""
        # A kernel's loop takes two vector registers at a time, and computes the rest differently:
        # with whole pairs for each client there is no rest (`fedsim.rows.packing`).
        multiple = self.packing.per_line * (2 if _LONG_REGISTERS else 1)
        padding = -batch.shape[1] % multiple
        if not padding or batch.is_cuda or not self.aligned:
            return batch
        return torch.cat([batch, batch[:, :1].expand(-1, padding, *batch.shape[2:])], dim=1)

    @staticmethod
    def _rows_of(block: Tensor, clients: slice) -> Tensor:
        """Tensors of these clients, on a CPU copied to an address that the allocator aligns."""
        return block if block.is_cuda else block[clients].clone()

    def _parts(self, theta: Tensor) -> list[slice]:
        """The whole block on a GPU or where that is aligned; else one client after another."""
        if theta.is_cuda or self.aligned:
            return [slice(None)]
        return [slice(k, k + 1) for k in range(len(theta))]

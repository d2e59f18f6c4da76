"""The plain path: one client at a time, PyTorch's autograd on the model as it was written.

The reference that the other paths are tested against, and the fallback for models that they
cannot take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.clients.gradients import Dense, Gradient
from fedsim.clients.losses import Loss
from fedsim.clients.packing import Packing

__all__ = ["PlainPath"]


@dataclass(frozen=True)
class PlainPath:
    """Autograd, client by client."""

    model: nn.Module
    packing: Packing
    loss: Loss

    name = "plain"

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Gradient, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``."""
        gradients, losses = torch.zeros_like(theta), torch.empty_like(weight)
        for k in range(len(theta)):
            # Copies start where the allocator puts everything, whatever k is.
            leaves = {
                name: value.requires_grad_()
                for name, value in self.packing.named(theta[k].detach().clone()).items()
            }
            with torch.enable_grad():
                each = self.loss(functional_call(self.model, leaves, (x[k].clone(),)), y[k])
                parts = torch.autograd.grad(
                    (each * weight[k]).sum(), list(leaves.values()), allow_unused=True
                )
            losses[k] = each.detach()
            for inside, part in zip(self.packing.slices.values(), parts, strict=True):
                if part is not None:
                    gradients[k, inside] = part.reshape(-1)
        return Dense(gradients), losses

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model ``[n, B, ...]`` at ``theta [n, D]``."""
        return torch.stack(
            [
                functional_call(self.model, self.packing.named(point.clone()), (own.clone(),))
                for point, own in zip(theta, x, strict=True)
            ]
        )

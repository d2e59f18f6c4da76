"""The plain path: one client at a time, PyTorch's autograd on the model as it was written.

The reference that the other paths are tested against, and the fallback for models that they
cannot take.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.clients.gradients import Gradient, Parts
from fedsim.rows.packing import Packing, channels_last
from fedsim.tasks.losses import Loss
from fedsim.training.hidden_draws import seeded

__all__ = ["PlainPath"]


class Held:
    """A model of its own whose trained parameters are views of one client's packed row.

    What is subtracted from the row is then subtracted from the model, and a client's steps set
    the parameters once.
    """

    def __init__(self, model: nn.Module, packing: Packing) -> None:
        trained = {id(p) for n, p in model.named_parameters() if n in packing.slices}
        rest = [*model.parameters(), *model.buffers()]
        # What is not trained stays the model's.
        shared = {id(tensor): tensor for tensor in rest if id(tensor) not in trained}
        self.model = copy.deepcopy(model, shared)
        named = dict(self.model.named_parameters())
        self.parameters = {name: named[name] for name in packing.slices}
        self._packing = packing
        self._theta: Tensor | None = None
        self.rows: dict[str, Tensor] = {}

    def at(self, theta: Tensor, training: bool) -> None:
        """Hold ``theta [1, D]``."""
        if self.model.training is not training:
            self.model.train(training)
        if self._theta is theta:
            return
        self.rows = self._packing.named(theta)
        for name, parameter in self.parameters.items():
            parameter.data = self.rows[name][0]
        self._theta = theta


@dataclass(frozen=True)
class PlainPath:
    """Autograd, client by client."""

    model: nn.Module
    packing: Packing
    loss: Loss

    name = "plain"

    def gradient(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        seeds: Sequence[int | None] | None = None,
    ) -> tuple[Gradient, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``.

        ``seeds [n]`` are those of what the model draws for each client.
        """
        if len(theta) == 1 and not theta.is_cuda and not self._channels_last:
            return self._held_gradient(theta, x[0], y[0], weight[0], seeds[0] if seeds else None)
        losses = torch.empty_like(weight)
        by_name: dict[str, list[Tensor]] = {name: [] for name in self.packing.slices}
        for k in range(len(theta)):
            leaves = {name: leaf.requires_grad_() for name, leaf in self._named(theta[k]).items()}
            with torch.enable_grad(), seeded(seeds[k] if seeds else None, theta.device):
                client_losses = self.loss(
                    functional_call(self.model, leaves, (self._placed(x[k]),)), y[k]
                )
                gradients = torch.autograd.grad(
                    (client_losses * weight[k]).sum(), list(leaves.values()), allow_unused=True
                )
            losses[k] = client_losses.detach()
            for name, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    by_name[name].append(gradient)
        stacked = {
            name: gradients[0].unsqueeze(0) if len(gradients) == 1 else torch.stack(gradients)
            for name, gradients in by_name.items()
            if gradients
        }
        return Parts(stacked, self.packing), losses

    @cached_property
    def _held(self) -> Held:
        return Held(self.model, self.packing)

    def _held_gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor, seed: int | None
    ) -> tuple[Gradient, Tensor]:
        """`gradient` of one client on a CPU, whose row the model holds."""
        held = self._held
        held.at(theta, self.model.training)
        parameters = held.parameters
        with torch.enable_grad(), seeded(seed, theta.device):
            losses = self.loss(held.model(self._placed(x)), y)
            gradients = torch.autograd.grad(
                (losses * weight).sum(), list(parameters.values()), allow_unused=True
            )
        parts = {
            name: gradient.unsqueeze(0)
            for name, gradient in zip(parameters, gradients, strict=True)
            if gradient is not None
        }
        return Parts(parts, self.packing, (theta, held.rows)), losses.detach().unsqueeze(0)

    def outputs(
        self, theta: Tensor, x: Tensor, seeds: Sequence[int | None] | None = None
    ) -> Tensor:
        """Outputs of the model ``[n, B, ...]`` at ``theta [n, D]``; ``seeds`` as in `gradient`."""
        outputs = []
        for k, (point, inputs) in enumerate(zip(theta, x, strict=True)):
            with seeded(seeds[k] if seeds else None, theta.device):
                outputs.append(
                    functional_call(self.model, self._named(point), (self._placed(inputs),))
                )
        return torch.stack(outputs)

    @cached_property
    def _channels_last(self) -> bool:
        """Images with channels last: faster convolutions on a CPU."""
        return any(isinstance(m, nn.Conv2d) for m in self.model.modules())

    def _placed(self, x: Tensor) -> Tensor:
        """One client's inputs, where the allocator puts everything: its bits are its own."""
        if self._channels_last and x.dim() == 4 and not x.is_cuda:
            return channels_last(x)
        return x.clone()

    def _named(self, point: Tensor) -> dict[str, Tensor]:
        named = {k: v.detach() for k, v in self.packing.named(point).items()}
        if self._channels_last and not point.is_cuda:
            for name, value in named.items():
                if value.dim() == 4:
                    named[name] = value.contiguous(memory_format=torch.channels_last)
        return named

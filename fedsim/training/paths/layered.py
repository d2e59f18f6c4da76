"""The layered path: convolutions with ReLU and pooling, then dense layers, backward by hand.

One client at a time, without autograd: see `fedsim.training.paths.front` for what that saves; a
weight gradient of a dense layer that only feeds a plain step is never written down.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.clients.gradients import Dense, Gradient
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.paths.alone import AlonePath
from fedsim.training.paths.front import ConvFront, front_of
from fedsim.training.paths.layers import covered, dense_layers
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.stacked import StackedPath
from fedsim.training.structure.reading import Structure

__all__ = ["LayeredPath", "layered"]


@dataclass(frozen=True)
class LayeredPath:
    """Client by client: the plain path's numbers.

    Attributes
    ----------
    plain : PlainPath
        Gives outputs.
    dense : StackedPath
        The dense layers.
    front : ConvFront
        The convolutions before them.
    """

    plain: PlainPath
    dense: StackedPath
    front: ConvFront

    name = "layered"

    @cached_property
    def one_by_one(self) -> AlonePath:
        """Its gradients, for many steps of one client."""
        return AlonePath(self.dense, self.front)

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Gradient, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``."""
        gradients: list[Gradient] = []
        losses = []
        for k in range(len(theta)):
            client = slice(k, k + 1)
            point = theta if len(theta) == 1 else theta[client]
            batch_losses = self.one_by_one.losses(y[client], weight[client])
            (features,) = self.one_by_one.features(x[client])
            gradients.append(self.one_by_one.gradient(point, features, batch_losses, 0))
            losses.append(batch_losses.seen())
        if len(gradients) == 1:
            return gradients[0], losses[0]
        return Dense(torch.cat([gradient.dense() for gradient in gradients])), torch.cat(losses)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model ``[n, B, ...]`` at ``theta [n, D]``."""
        return self.plain.outputs(theta, x)


def layered(structure: Structure, packing: Packing, loss: Loss) -> LayeredPath | None:
    """The layered path of a model, or None where there is none.

    There is one for a chain of convolutions, each followed by ReLU and perhaps max-pooling, and,
    after a Flatten, linear layers with at most one activation each; all convolutions trained.
    """
    modules = structure.chain
    front = None if modules is None else front_of(modules)
    if front is None:
        return None
    convolutions, rest = front
    layers = dense_layers(rest, packing.slices, flat=False)
    if not layers or layers[0].weight is None:
        return None
    parameters = sum(len(layer.parameters) for layer in convolutions)
    if covered(layers) + parameters != len(packing.slices):
        return None
    dense = StackedPath((), tuple(layers), packing, loss)
    plain = PlainPath(structure.module, packing, loss)
    return LayeredPath(plain, dense, ConvFront(convolutions))

"""The stacked path: dense layers of many clients as batched products, backward by hand.

A weight gradient that only feeds a plain step is never written down: the path hands out its
two factors (`Factored`), and the step folds them into the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedsim.clients.gradients import Factored
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.paths.blocks import BlockLayers, on_lines
from fedsim.training.paths.layers import ACTIVATIONS, DenseLayer, covered, dense_layers
from fedsim.training.paths.losses import BatchLosses, losses_of
from fedsim.training.structure.reading import Structure

__all__ = ["StackedPath", "stack"]

# Of a client's parameters, from which on they are worth keeping in the cache; see `alone`.
ALONE_BYTES = 2**19


def stack(
    structure: Structure, packing: Packing, loss: Loss, example_dims: int
) -> StackedPath | None:
    """The stacked path of a model, or None where there is none.

    There is one for a chain of modules whose trainable part is linear layers, each with at most one
    activation (ReLU, tanh, sigmoid) after it. What comes before it may be anything frozen.

    Parameters
    ----------
    structure : Structure
    packing : Packing
    loss : callable
        Known not to look across a batch.
    example_dims : int
        Dimensions of one input; a model without Flatten takes vectors (1) only.
    """
    modules = structure.chain
    if modules is None:
        return None
    slices = packing.slices
    trained = [any(p.requires_grad for p in m.parameters()) for _, m in modules]
    first = trained.index(True) if True in trained else 0
    if first and isinstance(modules[first - 1][1], nn.Flatten):
        first -= 1
    stem = [m for _, m in modules[:first]]
    vectors = example_dims == 1 and all(type(m) in {nn.Linear, *ACTIVATIONS} for m in stem)
    flat = vectors or any(isinstance(m, nn.Flatten) for m in stem)
    layers = dense_layers(modules[first:], slices, flat)
    if not layers or covered(layers) != len(slices):
        return None
    return StackedPath(tuple(stem), tuple(layers), packing, loss)


@dataclass(frozen=True)
class StackedPath:
    """Batched products over ``n`` clients: the same bits for every ``n``."""

    stem: tuple[nn.Module, ...]
    layers: tuple[DenseLayer, ...]
    packing: Packing
    loss: Loss

    name = "stacked"

    @property
    def alone(self) -> bool:
        """Whether clients take their steps one after another: `fedsim.training.paths.alone`."""
        size = self.packing.width * self.packing.layout.dtype.itemsize
        return size >= ALONE_BYTES and not self.layers[0].module.weight.is_cuda

    @cached_property
    def dense(self) -> BlockLayers:
        """The layers."""
        return BlockLayers(self.layers, self.packing)

    def losses(self, y: Tensor, weight: Tensor) -> BatchLosses:
        """Of batches of targets ``y [S, B, ...]`` and weights ``[S, B]``."""
        return losses_of(self.loss, y, weight)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model ``[n, B, K]`` at ``theta [n, D]``."""
        return self.dense.launched(theta, self._features(x)).outputs

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Factored, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``."""
        losses = self.losses(y, weight)
        return self.gradient_of(theta, x, losses, 0), losses.seen()

    def gradient_of(self, theta: Tensor, x: Tensor, losses: BatchLosses, first: int) -> Factored:
        """Gradients of ``n`` batches of these losses, from the ``first`` on: one a client."""
        way = self.dense.forward(theta, self._features(x))
        return way.backward(losses.deltas(way.outputs, first))

    def __reduce__(self) -> tuple[type[StackedPath], tuple[object, ...]]:
        # What is compiled stays in its process.
        return StackedPath, (self.stem, self.layers, self.packing, self.loss)

    def _features(self, x: Tensor) -> Tensor:
        """Inputs of the first stacked layer, ``[n, B, in]``."""
        if self.stem:
            # One client at a time: a convolution's bits may depend on how many rows it gets.
            outputs = []
            for features in x:
                for module in self.stem:
                    features = module(features)
                outputs.append(features)
            x = torch.stack(outputs)
        # Gathered batches lie without gaps; where a client's does not end on a line, the next
        # one's would not start on one.
        return on_lines(x.flatten(2))

"""The paths of a chain of layers, without autograd: stacked (dense) and layered (convolutions too).

A chain is read once into its layers (`conv_stack`, `dense_layers`): what comes before the trained
ones may be anything frozen, then convolutions, then linear layers. Clients with small rows take
each step together. Batched work over clients reads every client's parameters in each step, though:
where those of one client nearly fill the cache, and where there are convolutions, a client takes
all its steps by itself instead, and its row stays in the cache (`ChainPath.sequential`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedsim.clients.base import Dense, Gradient
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.gradients import Factored, Parts
from fedsim.training.paths.conv_stack import ConvLayer, ConvStack, conv_stack
from fedsim.training.paths.dense_layers import (
    ACTIVATIONS,
    CompiledGradient,
    DenseLayer,
    DenseLayers,
    covered,
    dense_layers,
)
from fedsim.training.paths.losses import BatchLosses, losses_of
from fedsim.training.paths.plain import PlainPath
from fedsim.training.structure.reading import Structure

# Of a client's parameters: from this size on a client takes all its steps before the next begins.
SEQUENTIAL_BYTES = 2**19


def stack(
    structure: Structure,
    packing: Packing,
    loss: Loss,
    example_dims: int,
    *,
    compiled: bool = False,
) -> ChainPath | None:
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
    compiled : bool
        Whether compiled kernels are used.
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
    return ChainPath(structure.module, tuple(stem), (), tuple(layers), packing, loss, compiled)


def layered(
    structure: Structure, packing: Packing, loss: Loss, *, compiled: bool = False
) -> ChainPath | None:
    """The layered path of a model, or None where there is none.

    There is one for a chain of convolutions, each followed by ReLU and perhaps max-pooling, and,
    after a Flatten, linear layers with at most one activation each; all convolutions trained.
    """
    modules = structure.chain
    split = None if modules is None else conv_stack(modules)
    if split is None:
        return None
    convolutions, rest = split
    layers = dense_layers(rest, packing.slices, flat=False)
    if not layers or layers[0].weight is None:
        return None
    parameters = sum(len(layer.parameters) for layer in convolutions)
    if covered(layers) + parameters != len(packing.slices):
        return None
    return ChainPath(
        structure.module, (), tuple(convolutions), tuple(layers), packing, loss, compiled
    )


@dataclass(frozen=True)
class ChainPath:
    """A model's layers: the same bits for every number of clients.

    Attributes
    ----------
    model : nn.Module
        The graph that was read.
    stem : tuple of nn.Module
        Frozen, before the layers.
    convolutions : tuple of ConvLayer
    layers : tuple of DenseLayer
        After them.
    packing : Packing
    loss : callable
    compiled : bool
        Whether compiled kernels are used.
    """

    model: nn.Module
    stem: tuple[nn.Module, ...]
    convolutions: tuple[ConvLayer, ...]
    layers: tuple[DenseLayer, ...]
    packing: Packing
    loss: Loss
    compiled: bool

    @property
    def name(self) -> str:
        """Its name in a config."""
        return "layered" if self.convolutions else "stacked"

    @property
    def sequential(self) -> bool:
        """Whether clients take their steps one after another."""
        size = self.packing.width * self.packing.layout.dtype.itemsize
        on_gpu = self.layers[0].module.weight.is_cuda
        return not on_gpu and (bool(self.convolutions) or size >= SEQUENTIAL_BYTES)

    @cached_property
    def dense(self) -> DenseLayers:
        """The dense layers, ready for a pass."""
        return DenseLayers(self.layers, self.packing, compiled=self.compiled)

    def __reduce__(self) -> tuple[type[ChainPath], tuple[object, ...]]:
        # Compiled functions cannot be pickled; the other process compiles its own.
        return ChainPath, (
            self.model, self.stem, self.convolutions, self.layers, self.packing, self.loss,
            self.compiled,
        )  # fmt: skip

    def losses(self, y: Tensor, weight: Tensor) -> BatchLosses:
        """Of batches of targets ``y [S, B, ...]`` and weights ``[S, B]``."""
        return losses_of(self.loss, y, weight)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model ``[n, B, K]`` at ``theta [n, D]``."""
        if self.convolutions:
            return PlainPath(self.model, self.packing, self.loss).outputs(theta, x)
        return self.dense.eager(theta, self._features(x)).outputs

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Gradient, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``."""
        losses = self.losses(y, weight)
        return self.gradient_of(theta, x, losses, 0), losses.values()

    def gradient_of(
        self, theta: Tensor, x: Tensor, losses: BatchLosses, first: int
    ) -> LayersGradient:
        """Gradients of ``n`` batches of these losses, from the ``first`` on: one a client."""
        if not self.convolutions:
            through = self.dense.forward(theta, self._features(x))
            return through.backward(losses.deltas(through.outputs, first))[0]
        if len(theta) == 1:
            return self._convolved(theta, x[0], losses, first)
        rows = [
            self._convolved(theta[k : k + 1], x[k], losses, first + k).dense()
            for k in range(len(theta))
        ]
        return Dense(torch.cat(rows))

    def _convolved(
        self, theta: Tensor, x: Tensor, losses: BatchLosses, batch: int
    ) -> ConvolvedGradient:
        """Gradient at ``theta [1, D]`` of one of the batches, ``x [B, C, H, W]``."""
        stack = ConvStack(self.convolutions, compiled=self.compiled)
        features, activations = stack.forward(self.packing.named(theta[0]), x)
        through = self.dense.forward(theta, features.flatten(1)[None])
        gradient, delta = through.backward(losses.deltas(through.outputs, batch), below=True)
        assert delta is not None
        convolved = stack.backward(delta.view(features.shape), activations)
        return ConvolvedGradient(gradient, convolved, self.packing)

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
        return x.flatten(2)


@dataclass(frozen=True)
class ConvolvedGradient:
    """Gradient of one client: of its dense layers by factors, of its convolutions written out.

    Attributes
    ----------
    dense_part : CompiledGradient or Factored
    convolved : mapping of name to Tensor
    packing : Packing
    """

    dense_part: CompiledGradient | Factored
    convolved: Mapping[str, Tensor]
    packing: Packing

    def __getitem__(self, clients: slice) -> Gradient:
        """Of this client, or of none."""
        return Dense(self.dense())[clients]

    @cached_property
    def _parts(self) -> Parts:
        """Of the convolutions, as the gradient of a block of one."""
        return Parts({k: part[None] for k, part in self.convolved.items()}, self.packing)

    def dense(self) -> Tensor:
        """Write it out, ``[1, D]``."""
        out = self.dense_part.dense()
        for name, part in self.convolved.items():
            out[0, self.packing.slices[name]].view(part.shape).copy_(part)
        return out

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """Fold the factors into ``theta`` without a gradient in between."""
        # A CPU reads a number at no cost, and a multiply-add takes one as a factor.
        number, into = float(rate), theta if out is None else out
        self.dense_part.subtract_from(theta, rate, out)
        for name, part in self.convolved.items():
            place = self.packing.slices[name]
            old, new = (rows[0, place].view(part.shape) for rows in (theta, into))
            torch.add(old, part, alpha=-number, out=new)

    def distance(self, other: Gradient) -> Tensor:
        """L2 distance, from the factors."""
        if not isinstance(other, ConvolvedGradient):
            return Dense(self.dense()).distance(other)
        distance = self.dense_part.distance(other.dense_part)
        return torch.hypot(distance, self._parts.distance(other._parts))

    def norms(self) -> Tensor:
        """L2 norms, from the factors."""
        return torch.hypot(self.dense_part.norms(), self._parts.norms())

    def peak(self) -> Tensor:
        """The norm: no coordinate is larger."""
        return self.norms()

    def scaled(self, factors: Tensor) -> ConvolvedGradient:
        """The gradients times the one factor."""
        convolved = {name: part * factors for name, part in self.convolved.items()}
        return replace(self, dense_part=self.dense_part.scaled(factors), convolved=convolved)


LayersGradient = CompiledGradient | Factored | ConvolvedGradient | Dense

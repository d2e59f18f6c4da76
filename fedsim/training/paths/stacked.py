"""The stacked path: dense layers of many clients as batched products, backward by hand.

A weight gradient that only feeds a plain step is never written down: the path hands out its
two factors (`Factored`), and the step folds them into the weights.

A client must get the same bits in a block of one as in a block of a thousand. Libraries pick their
kernel, and with it the order of a sum, by the size of a matrix and by the address at which it
starts. So every client's matrix starts on a cache line (`aligned_empty`, `on_lines`), products are
made of all clients in one call, and a layer with fewer outputs than `NARROW` is computed as one of
`NARROW` outputs. On a CPU a compiled pass may take the place of torch's calls: it is used only if
it gives torch's very bytes on clients made up for the purpose (`BlockLayers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedsim.kernels.dense import NARROW, blocks_of
from fedsim.kernels.dense_calls import DenseBatch
from fedsim.rows.packing import LINE, Packing, aligned_empty
from fedsim.tasks.losses import Loss
from fedsim.training.gradients import Factor, Factored
from fedsim.training.paths.dense_layers import (
    ACTIVATIONS,
    DenseLayer,
    covered,
    dense_layers,
    shapes_of,
)
from fedsim.training.paths.losses import BatchLosses, losses_of
from fedsim.training.structure.reading import Structure

# Of a client's parameters: from this size on a client takes all its steps before the next begins.
SEQUENTIAL_BYTES = 2**19


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
    def sequential(self) -> bool:
        """Whether clients take their steps one after another (`OneClientPath`)."""
        size = self.packing.width * self.packing.layout.dtype.itemsize
        return size >= SEQUENTIAL_BYTES and not self.layers[0].module.weight.is_cuda

    @cached_property
    def dense(self) -> BlockLayers:
        """The layers."""
        return BlockLayers(self.layers, self.packing)

    def losses(self, y: Tensor, weight: Tensor) -> BatchLosses:
        """Of batches of targets ``y [S, B, ...]`` and weights ``[S, B]``."""
        return losses_of(self.loss, y, weight)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model ``[n, B, K]`` at ``theta [n, D]``."""
        return self.dense.eager(theta, self._features(x)).outputs

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Factored, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``."""
        losses = self.losses(y, weight)
        return self.gradient_of(theta, x, losses, 0), losses.values()

    def gradient_of(self, theta: Tensor, x: Tensor, losses: BatchLosses, first: int) -> Factored:
        """Gradients of ``n`` batches of these losses, from the ``first`` on: one a client."""
        through = self.dense.forward(theta, self._features(x))
        return through.backward(losses.deltas(through.outputs, first))

    def __reduce__(self) -> tuple[type[StackedPath], tuple[object, ...]]:
        # Compiled functions cannot be pickled; the other process compiles its own.
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


RATES = (0.25, 0.3, 0.7)
"""Of the clients with which a compiled pass is tried."""


class BlockLayers:
    """All layers of a block's clients.

    Parameters
    ----------
    layers : sequence of DenseLayer
    packing : Packing
    """

    def __init__(self, layers: Sequence[DenseLayer], packing: Packing) -> None:
        self.layers, self.packing = layers, packing
        # Below the first layer that is trained nobody wants a gradient.
        self.first = next(i for i, layer in enumerate(layers) if layer.weight or layer.bias)
        self._shapes = shapes_of(layers)
        self._batches: dict[tuple[int, int], DenseBatch | None] = {}

    def forward(self, theta: Tensor, x: Tensor) -> BlockPass:
        """Go through the layers at ``theta [n, D]`` with inputs ``x [n, B, in]``."""
        compiled = self._compiled(theta, x)
        without_gaps = x.dtype is theta.dtype and x.stride()[1:] == (x.shape[2], 1)
        if compiled is not None and without_gaps and compiled.takes_all(theta):
            return CompiledBlock(self, compiled, theta, x, compiled.forward_all(theta, x))
        return self.eager(theta, x)

    def eager(self, theta: Tensor, x: Tensor) -> EagerBlock:
        """The same, operation by operation."""
        values = [x]
        for layer in self.layers:
            weight, bias = layer.parameters(theta)
            # Each client's outputs start on a cache line: the library picks its kernel by where a
            # matrix lies, and a client's bits must not depend on its place in the block.
            h = aligned_empty(x, *x.shape[:2], weight.shape[1])
            if weight.shape[1] < NARROW and x.dtype == torch.float32 and not x.is_cuda:
                _narrow(values[-1], weight, bias, h)
            elif bias is None:
                torch.bmm(values[-1], weight.transpose(1, 2), out=h)
            else:
                torch.baddbmm(bias, values[-1], weight.transpose(1, 2), out=h)
            if layer.activation is not None:
                # In place: backward needs the outputs of these activations, never their inputs.
                h = ACTIVATIONS[layer.activation][0](h)
            values.append(h)
        return EagerBlock(self, theta, values)

    def _compiled(self, theta: Tensor, x: Tensor) -> DenseBatch | None:
        if self._shapes is None or theta.is_cuda:
            return None
        key = x.shape[1], torch.get_num_threads()
        if key not in self._batches:
            compiled = blocks_of(self._shapes, x.shape[1], theta)
            self._batches[key] = next(filter(self._gives_torchs_bytes, compiled), None)
        return self._batches[key]

    def _gives_torchs_bytes(self, batch: DenseBatch) -> bool:
        """Whether made-up clients end at the same bytes as they do operation by operation."""
        generator = torch.Generator().manual_seed(0)
        n, like = len(RATES), batch.ones
        theta = like.new_empty(n, self.packing.width).normal_(generator=generator)
        x = aligned_empty(like, n, batch.batch, batch.shapes[0].inputs).normal_(generator=generator)
        delta = like.new_empty(n, batch.batch, batch.shapes[-1].outputs)
        delta.normal_(generator=generator)
        # A zero has a sign, which one order of sums keeps and another loses.
        theta[:, ::7], x[..., ::3], delta[..., ::4] = -0.0, 0.0, -0.0
        passes: list[BlockPass] = [
            CompiledBlock(self, batch, theta, x, batch.forward_all(theta, x)),
            self.eager(theta, x),
        ]
        compiled, eager = ([one.outputs, *self._results(one, theta, delta)] for one in passes)
        return all(map(_same_bytes, compiled, eager))

    @staticmethod
    def _results(one: BlockPass, theta: Tensor, delta: Tensor) -> list[Tensor]:
        """All that a backward pass gives: factors, and steps in place and into other rows."""
        gradient = one.backward(delta)
        rates, inside, other = theta.new_tensor(RATES), theta.clone(), torch.zeros_like(theta)
        gradient.subtract_from(inside, rates)
        gradient.subtract_from(theta, rates, other)
        factors = [part for factor in gradient.factors for part in (factor.x, factor.delta)]
        return [*factors, inside, other]


@dataclass(frozen=True)
class CompiledBlock:
    """A batch's pass through the layers of ``n`` clients, all in one call of a `DenseBatch`."""

    layers: BlockLayers
    batch: DenseBatch
    point: Tensor
    x: Tensor
    buffers: Tensor

    @property
    def outputs(self) -> Tensor:
        """Of the last layer, ``[n, B, K]``."""
        return self.batch.values(self.buffers, len(self.batch.shapes) - 1)

    def backward(self, delta: Tensor) -> Factored:
        """The gradients, from that of the outputs."""
        self.batch.backward_all(self.point, self.buffers, delta.contiguous())
        dense, values = self.layers.layers, [self.x]
        values += [self.batch.values(self.buffers, i) for i in range(len(dense) - 1)]
        factors = [
            Factor(values[i], self.batch.deltas(self.buffers, i), dense[i].weight, dense[i].bias)
            for i in range(len(dense) - 1, -1, -1)
        ]
        return Factored(factors, self.layers.packing, self._subtract)

    def _subtract(self, theta: Tensor, rate: Tensor, out: Tensor) -> bool:
        if not self.batch.takes_all(theta, out) or rate.dtype != theta.dtype:
            return False
        self.batch.subtract_all(rate.contiguous(), theta, out, self.x, self.buffers)
        return True


@dataclass(frozen=True)
class EagerBlock:
    """A batch's pass through the layers of ``n`` clients, by batched products over them.

    Attributes
    ----------
    layers : BlockLayers
    point : Tensor ``[n, D]``
    values : list of Tensor
        Inputs of every layer, and the outputs, each ``[n, B, width]``.
    """

    layers: BlockLayers
    point: Tensor
    values: Sequence[Tensor]

    @property
    def outputs(self) -> Tensor:
        """Of the last layer, ``[n, B, K]``."""
        return self.values[-1]

    def backward(self, delta: Tensor) -> Factored:
        """The gradients, from that of the outputs."""
        factors: list[Factor] = []
        for i in range(len(self.values) - 2, self.layers.first - 1, -1):
            layer = self.layers.layers[i]
            if layer.activation is not None:
                delta = ACTIVATIONS[layer.activation][1](delta, self.values[i + 1])
            delta = on_lines(delta)
            # delta^T x would be the weight gradient. A plain step folds the two factors into the
            # weights in one product (`Factored`), and others write it down.
            if layer.weight is not None or layer.bias is not None:
                factors.append(Factor(self.values[i], delta, layer.weight, layer.bias))
            if i > self.layers.first:
                below = aligned_empty(delta, *self.values[i].shape)
                delta = torch.bmm(delta, layer.parameters(self.point)[0], out=below)
        return Factored(factors, self.layers.packing)


BlockPass = CompiledBlock | EagerBlock


def _narrow(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Outputs ``[n, B, few]`` into ``out``, as of a layer with `NARROW` of them."""
    n, few, inputs = weight.shape
    wide = weight.new_zeros(n, NARROW, inputs)
    wide[:, :few] = weight
    h = aligned_empty(x, n, x.shape[1], NARROW)
    if bias is None:
        torch.bmm(x, wide.transpose(1, 2), out=h)
    else:
        wide_bias = bias.new_zeros(n, 1, NARROW)
        wide_bias[..., :few] = bias
        torch.baddbmm(wide_bias, x, wide.transpose(1, 2), out=h)
    out.copy_(h[..., :few])


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


def on_lines(block: Tensor) -> Tensor:
    """``[n, B, width]`` whose clients each start on a line, as the next product wants them."""
    if block.stride(0) * block.element_size() % LINE == 0:
        return block
    return aligned_empty(block, *block.shape).copy_(block)

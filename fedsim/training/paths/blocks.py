"""A batch's way through the dense layers of a block's clients: compiled, or launch by launch.

Both give the same bytes, for any number of clients: what is compiled has to show it before it is
used. See `fedsim.compiled.dense`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedsim.clients.gradients import Factor, Factored
from fedsim.compiled.dense import NARROW, blocks_of
from fedsim.compiled.dense_calls import DenseBatch
from fedsim.rows.alignment import LINE, aligned_empty
from fedsim.rows.packing import Packing
from fedsim.training.paths.layers import ACTIVATIONS, DenseLayer, shapes_of

__all__ = ["BlockLayers", "BlockPass", "on_lines"]

RATES = (0.25, 0.3, 0.7)
"""Of the clients with which a compiled pass is tried."""


class BlockPass(Protocol):
    """A batch's way through the layers of ``n`` clients, each at its own point."""

    @property
    def outputs(self) -> Tensor:
        """Of the last layer, ``[n, B, K]``."""

    def backward(self, delta: Tensor) -> Factored:
        """The gradients, from that of the outputs."""


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
        return self.launched(theta, x)

    def launched(self, theta: Tensor, x: Tensor) -> LaunchedBlock:
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
        return LaunchedBlock(self, theta, values)

    def _compiled(self, theta: Tensor, x: Tensor) -> DenseBatch | None:
        if self._shapes is None or theta.is_cuda:
            return None
        key = x.shape[1], torch.get_num_threads()
        if key not in self._batches:
            ways = blocks_of(self._shapes, x.shape[1], theta)
            self._batches[key] = next(filter(self._gives_torchs_bytes, ways), None)
        return self._batches[key]

    def _gives_torchs_bytes(self, batch: DenseBatch) -> bool:
        """Whether made-up clients end where they do launch by launch."""
        generator = torch.Generator().manual_seed(0)
        n, like = len(RATES), batch.ones
        theta = like.new_empty(n, self.packing.width).normal_(generator=generator)
        x = aligned_empty(like, n, batch.batch, batch.shapes[0].inputs).normal_(generator=generator)
        delta = like.new_empty(n, batch.batch, batch.shapes[-1].outputs)
        delta.normal_(generator=generator)
        # A zero has a sign, which a sum of zeros keeps or loses.
        theta[:, ::7], x[..., ::3], delta[..., ::4] = -0.0, 0.0, -0.0
        ways: list[BlockPass] = [
            CompiledBlock(self, batch, theta, x, batch.forward_all(theta, x)),
            self.launched(theta, x),
        ]
        compiled, launched = ([way.outputs, *self._ended(way, theta, delta)] for way in ways)
        return all(map(_same_bytes, compiled, launched))

    @staticmethod
    def _ended(way: BlockPass, theta: Tensor, delta: Tensor) -> list[Tensor]:
        """All that a pass back leads to: what is subtracted in place, and into other rows."""
        gradient = way.backward(delta)
        rates, inside, other = theta.new_tensor(RATES), theta.clone(), torch.zeros_like(theta)
        gradient.subtract_from(inside, rates)
        gradient.subtract_from(theta, rates, other)
        factors = [part for factor in gradient.factors for part in (factor.x, factor.delta)]
        return [*factors, inside, other]


@dataclass(frozen=True)
class CompiledBlock:
    """All layers of all clients in one call: see `DenseBatch`."""

    layers: BlockLayers
    batch: DenseBatch
    point: Tensor
    x: Tensor
    buffers: Tensor

    @property
    def outputs(self) -> Tensor:
        """See `BlockPass`."""
        return self.batch.values(self.buffers, len(self.batch.shapes) - 1)

    def backward(self, delta: Tensor) -> Factored:
        """See `BlockPass`."""
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
class LaunchedBlock:
    """Operation by operation: batched products over the clients.

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
        """See `BlockPass`."""
        return self.values[-1]

    def backward(self, delta: Tensor) -> Factored:
        """See `BlockPass`."""
        factors: list[Factor] = []
        for i in range(len(self.values) - 2, self.layers.first - 1, -1):
            layer = self.layers.layers[i]
            if layer.activation is not None:
                delta = ACTIVATIONS[layer.activation][1](delta, self.values[i + 1])
            delta = on_lines(delta)
            # delta^T x would be the weight gradient. It is left to whoever needs it written down:
            # a plain step folds the two factors into the weights in one product (`Factored`).
            if layer.weight is not None or layer.bias is not None:
                factors.append(Factor(self.values[i], delta, layer.weight, layer.bias))
            if i > self.layers.first:
                below = aligned_empty(delta, *self.values[i].shape)
                delta = torch.bmm(delta, layer.parameters(self.point)[0], out=below)
        return Factored(factors, self.layers.packing)


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

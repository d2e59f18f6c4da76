"""A chain of linear layers, each with an activation: outputs and gradients of ``n`` clients.

A pass runs forward and backward at each client's own parameters, and returns gradients as factors:
a weight gradient is multiplied out only where it is needed. There are two executors
(`client.kernel`), which agree up to rounding. The compiled one takes all layers of all clients in a
call of ``dense.c``, which fixes the order of sums. The eager one makes batched products over the
clients, operation by operation, on any device.

With either executor, a client has the same bits in a block of one as in a block of a thousand. For
the eager one that takes care: libraries pick their kernel, and with it the order of a sum, by the
size of a matrix and by the address at which it starts. So every client's matrix starts on a cache
line (`aligned_empty`, `_cache_aligned`), one call multiplies for all clients, and a layer with
fewer outputs than `NARROW` is padded to `NARROW` outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from fedsim.clients.base import DenseGradient, Gradient, require_slice
from fedsim.kernels.dense import DenseKernel, DensePass, DenseShape, dense_kernel
from fedsim.rows.packing import LINE, Packing, aligned_empty, sigmoid_
from fedsim.training.gradients import FactoredGradient, LayerFactors, distance_between

COMPILED = (None, nn.ReLU)
"""Activations that the compiled kernel supports; any other may follow the last layer."""
NARROW = 16
"""Fewest outputs with which a library's products do not depend on the number of clients."""

Backward = Callable[[Tensor, Tensor], Tensor]
Parameters = tuple[Tensor, Tensor | None]

# In-place forward, and backward from (gradient of the output, output).
ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Backward]] = {
    nn.ReLU: (torch.relu_, lambda delta, h: torch.ops.aten.threshold_backward.default(delta, h, 0)),
    nn.Tanh: (torch.tanh_, lambda delta, h: torch.ops.aten.tanh_backward(delta, h)),
    nn.Sigmoid: (sigmoid_, lambda delta, h: torch.ops.aten.sigmoid_backward(delta, h)),
}


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer and the activation after it; None as a slice means frozen parameters."""

    module: nn.Linear
    weight: slice | None
    bias: slice | None
    activation: type[nn.Module] | None

    def parameters(self, theta: Tensor) -> Parameters:
        """Weights ``[n, out, in]`` and biases ``[n, 1, out]`` of the block."""
        n = len(theta)
        outputs, inputs = self.module.weight.shape
        if self.weight is None:
            weight = self.module.weight.detach().expand(n, outputs, inputs)
        else:
            weight = theta[:, self.weight].view(n, outputs, inputs)
        if self.bias is not None:
            return weight, theta[:, self.bias].view(n, 1, outputs)
        frozen: Tensor | None = getattr(self.module, "bias", None)
        return weight, None if frozen is None else frozen.detach().expand(n, 1, outputs)


def _shapes(layers: Sequence[DenseLayer]) -> tuple[DenseShape, ...] | None:
    """The layers' shapes for the compiled kernel; None if it does not support them."""
    shapes = []
    for layer in layers:
        module = layer.module
        frozen_bias = module.bias is not None and layer.bias is None
        compiled_activation = layer is layers[-1] or layer.activation in COMPILED
        if layer.weight is None or frozen_bias or not compiled_activation:
            return None
        bias = -1 if layer.bias is None else layer.bias.start
        relu = layer.activation is nn.ReLU
        shapes.append(
            DenseShape(module.in_features, module.out_features, layer.weight.start, bias, relu)
        )
    return tuple(shapes)


class DenseLayers:
    """A chain of linear layers, with one of the executors.

    Parameters
    ----------
    layers : sequence of DenseLayer
    packing : Packing
    compiled : bool
        Whether to use the compiled kernel, where it supports the layers and the dtype.
    """

    def __init__(self, layers: Sequence[DenseLayer], packing: Packing, *, compiled: bool) -> None:
        self.layers, self.packing = layers, packing
        # No gradient is needed below the first layer that is trained.
        self.first_trained = next(i for i, layer in enumerate(layers) if layer.weight or layer.bias)
        self._shapes = _shapes(layers) if compiled else None
        self._kernels: dict[int, DenseKernel | None] = {}
        self._viewed: tuple[Tensor, list[Parameters]] | None = None

    def gradient(
        self,
        theta: Tensor,
        x: Tensor,
        deltas: Callable[[Tensor], Tensor],
        *,
        with_inputs: bool = False,
    ) -> tuple[CompiledGradient | FactoredGradient, Tensor | None]:
        """Forward and backward pass at ``theta [n, D]`` with inputs ``x [n, B, in]``.

        ``deltas`` maps the outputs ``[n, B, K]`` to their gradients. Returns the layers' gradients,
        and with ``with_inputs`` those of the inputs.
        """
        kernel = None if theta.is_cuda else self._kernel(x.shape[1], theta.dtype)
        if kernel is None or x.dtype != theta.dtype:
            return self._eager(theta, x, deltas, with_inputs)
        # The kernel is given the stride from client to client; within one there may be no gaps.
        if theta.stride(1) != 1:
            theta = theta.contiguous()
        last = self.layers[-1].activation
        if last not in COMPILED:
            deltas = partial(_deltas_before, ACTIVATIONS[last], deltas)
        dense_pass, inputs = kernel.gradient(theta, x.contiguous(), deltas, with_inputs=with_inputs)
        return CompiledGradient(self, dense_pass), inputs

    def _eager(
        self, theta: Tensor, x: Tensor, deltas: Callable[[Tensor], Tensor], with_inputs: bool
    ) -> tuple[FactoredGradient, Tensor | None]:
        """`gradient` by batched products over the clients."""
        values = self.values(theta, x)
        delta = deltas(values[-1])
        factors: list[LayerFactors] = []
        first = 0 if with_inputs else self.first_trained
        inputs: Tensor | None = None
        for i in range(len(self.layers) - 1, first - 1, -1):
            layer = self.layers[i]
            if layer.activation is not None:
                delta = ACTIVATIONS[layer.activation][1](delta, values[i + 1])
            delta = _cache_aligned(delta)
            # delta^T x would be the weight gradient. A plain step subtracts the factors' product
            # from the weights in one operation (`FactoredGradient`); other steps multiply it out.
            if layer.weight is not None or layer.bias is not None:
                factors.append(LayerFactors(values[i], delta, layer.weight, layer.bias))
            if i > first or with_inputs:
                inputs = aligned_empty(delta, *values[i].shape)
                delta = torch.bmm(delta, self._parameters(theta)[i][0], out=inputs)
        return FactoredGradient(factors, self.packing), inputs if with_inputs else None

    def values(self, theta: Tensor, x: Tensor) -> list[Tensor]:
        """Inputs of every layer, and the outputs, each ``[n, B, width]``; not compiled."""
        values = [_cache_aligned(x)]
        for layer, (weight, bias) in zip(self.layers, self._parameters(theta), strict=True):
            h = aligned_empty(x, *x.shape[:2], weight.shape[1])
            if weight.shape[1] < NARROW and x.dtype == torch.float32 and not x.is_cuda:
                _padded_linear(values[-1], weight, bias, h)
            elif bias is None:
                torch.bmm(values[-1], weight.transpose(1, 2), out=h)
            else:
                torch.baddbmm(bias, values[-1], weight.transpose(1, 2), out=h)
            if layer.activation is not None:
                # In place: backward needs the outputs of these activations, never their inputs.
                h = ACTIVATIONS[layer.activation][0](h)
            values.append(h)
        return values

    def _parameters(self, theta: Tensor) -> list[Parameters]:
        """Parameters of all layers, as views that are kept for the next step in the same tensor."""
        # Cutting rows into views takes as long as a small product.
        if self._viewed is None or self._viewed[0] is not theta:
            self._viewed = theta, [layer.parameters(theta) for layer in self.layers]
        return self._viewed[1]

    def _kernel(self, batch: int, dtype: torch.dtype) -> DenseKernel | None:
        if self._shapes is None:
            return None
        if batch not in self._kernels:
            width = self.packing.width
            self._kernels[batch] = dense_kernel(self._shapes, width, batch, dtype)
        return self._kernels[batch]


@dataclass(frozen=True)
class CompiledGradient:
    """Gradients of ``n`` clients, as the factors that a compiled kernel leaves in its buffers.

    Attributes
    ----------
    dense_layers : DenseLayers
    dense_pass : DensePass
    """

    dense_layers: DenseLayers
    dense_pass: DensePass

    def __getitem__(self, clients: slice) -> CompiledGradient:
        """Gradients of these clients."""
        return replace(self, dense_pass=self.dense_pass[require_slice(clients)])

    @property
    def factors(self) -> Sequence[LayerFactors]:
        """Factors of each layer, the last layer's first."""
        dense_pass, layers = self.dense_pass, self.dense_layers.layers
        values = [dense_pass.x, *(dense_pass.values(i) for i in range(len(layers) - 1))]
        return [
            LayerFactors(values[i], dense_pass.deltas(i), layers[i].weight, layers[i].bias)
            for i in range(len(layers) - 1, -1, -1)
        ]

    def dense(self) -> Tensor:
        """Packed rows ``[n, D]`` of the gradients, multiplied out: zeros minus -1 times them."""
        x = self.dense_pass.x
        out = x.new_zeros(len(x), self.dense_layers.packing.width)
        self.dense_pass.subtract(out.new_full((len(out),), -1.0), out, out)
        return out

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """Subtract ``rate`` times the products of the factors, without forming a gradient."""
        into, rates = theta if out is None else out, rate.to(theta.dtype).contiguous()
        if theta.stride()[1:] == into.stride()[1:] == (1,):
            self.dense_pass.subtract(rates, theta, into)
            return
        # A user's algorithm may have rows with gaps, which the kernel does not take.
        updated = into.clone(memory_format=torch.contiguous_format)
        self.dense_pass.subtract(rates, theta.contiguous(), updated)
        into.copy_(updated)

    def distance(self, other: Gradient) -> Tensor:
        """L2 distances ``[n]``, from inner products of the factors."""
        if (
            not isinstance(other, CompiledGradient)
            or other.dense_pass.kernel is not self.dense_pass.kernel
        ):
            return DenseGradient(self.dense()).distance(other)
        return distance_between(
            self._squares, other._squares, self.dense_pass.inner(other.dense_pass)
        )

    def norms(self) -> Tensor:
        """L2 norms ``[n]``, from inner products of the factors."""
        return self._squares.clamp(min=0).sqrt_()

    @cached_property
    def _squares(self) -> Tensor:
        return self.dense_pass.inner(self.dense_pass)

    def scaled(self, factors: Tensor) -> CompiledGradient:
        """The gradients times ``factors [n]``, by scaling the output gradients."""
        return replace(self, dense_pass=self.dense_pass.scaled(factors))

    def max_abs(self) -> Tensor:
        """The L2 norms, which bound every coordinate."""
        return self.norms()


def _deltas_before(
    activation: tuple[Callable[[Tensor], Tensor], Backward],
    deltas: Callable[[Tensor], Tensor],
    outputs: Tensor,
) -> Tensor:
    """Gradients of outputs before an activation that is not compiled."""
    forward, backward = activation
    h = forward(aligned_empty(outputs, *outputs.shape).copy_(outputs))
    return backward(deltas(h), h)


def _padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write outputs ``[n, B, few]`` to ``out``, computed by a layer padded to `NARROW` outputs."""
    n, outputs, inputs = weight.shape
    wide = weight.new_empty(n, NARROW, inputs)
    wide[:, :outputs], wide[:, outputs:] = weight, 0
    h = aligned_empty(x, n, x.shape[1], NARROW)
    if bias is None:
        torch.bmm(x, wide.transpose(1, 2), out=h)
    else:
        wide_bias = bias.new_zeros(n, 1, NARROW)
        wide_bias[..., :outputs] = bias
        torch.baddbmm(wide_bias, x, wide.transpose(1, 2), out=h)
    out.copy_(h[..., :outputs])


def _cache_aligned(block: Tensor) -> Tensor:
    """``block [n, B, width]``, copied unless each client in it starts on a cache line."""
    is_single = len(block) == 1 and block.is_contiguous()
    step = block.data_ptr() if is_single else block.stride(0) * block.element_size()
    if step % LINE == 0:
        return block
    return aligned_empty(block, *block.shape).copy_(block)

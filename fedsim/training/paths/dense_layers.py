"""Linear layers one after another, each with an activation; and one client's pass through them.

Two implementations give the same bytes: compiled, all layers in one call, and eager, operation by
operation. They can, because each follows one order of sums (`fedsim.kernels.dense`). The backward
pass stops at factors (`LayerFactors`): a weight gradient is written down only by those who need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsim.kernels.dense import batch_of
from fedsim.kernels.dense_calls import DenseBatch, DenseShape
from fedsim.rows.packing import sigmoid_
from fedsim.training.gradients import Factor, inner_products

COMPILED = (None, nn.ReLU)
"""Activations of layers that compiled functions take."""

Backward = Callable[[Tensor, Tensor], Tensor]

# In-place forward, and backward from (gradient of the output, output).
ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Backward]] = {
    nn.ReLU: (torch.relu_, lambda delta, h: torch.ops.aten.threshold_backward.default(delta, h, 0)),
    nn.Tanh: (torch.tanh_, lambda delta, h: torch.ops.aten.tanh_backward(delta, h)),
    nn.Sigmoid: (sigmoid_, lambda delta, h: torch.ops.aten.sigmoid_backward(delta, h)),
}


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer and the activation after it; a slice of None marks frozen parameters."""

    module: nn.Linear
    weight: slice | None
    bias: slice | None
    activation: type[nn.Module] | None

    def parameters(self, theta: Tensor) -> tuple[Tensor, Tensor | None]:
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


def dense_layers(
    modules: Sequence[tuple[str, nn.Module]], slices: Mapping[str, slice], flat: bool
) -> list[DenseLayer] | None:
    """Layers of modules by name, if they are linear with at most one activation each.

    ``flat``: what they are given are vectors; otherwise a Flatten comes first.
    """
    layers: list[DenseLayer] = []
    for name, module in modules:
        if isinstance(module, nn.Flatten):
            if module.start_dim != 1 or module.end_dim != -1:
                return None
            flat = True
        elif type(module) is nn.Linear and flat:
            weight, bias = slices.get(f"{name}.weight"), slices.get(f"{name}.bias")
            layers.append(DenseLayer(module, weight, bias, None))
        elif type(module) in ACTIVATIONS and layers and layers[-1].activation is None:
            layers[-1] = replace(layers[-1], activation=type(module))
        else:
            return None
    return layers


def covered(layers: Sequence[DenseLayer]) -> int:
    """How many trained parameters they have."""
    return sum((s is not None) for layer in layers for s in (layer.weight, layer.bias))


def shapes_of(layers: Sequence[DenseLayer]) -> tuple[DenseShape, ...] | None:
    """The layers as compiled functions take them; None where they do not."""
    shapes = []
    for layer in layers:
        module = layer.module
        frozen_bias = module.bias is not None and layer.bias is None
        if layer.weight is None or frozen_bias or layer.activation not in COMPILED:
            return None
        bias = -1 if layer.bias is None else layer.bias.start
        relu = layer.activation is nn.ReLU
        shapes.append(
            DenseShape(module.in_features, module.out_features, layer.weight.start, bias, relu)
        )
    return tuple(shapes)


class LayerFactors(NamedTuple):
    """A layer's share of a gradient: ``delta^T x``, of ``delta [B, out]`` and ``x [B, in]``."""

    layer: int
    x: Tensor
    delta: Tensor


class LayerParameters(NamedTuple):
    """A layer's parameters: weight ``[out, in]``, its transpose, and bias ``[out]`` or None."""

    weight: Tensor
    by_input: Tensor
    bias: Tensor | None


class DenseLayers:
    """All layers of one client.

    Parameters
    ----------
    layers : sequence of DenseLayer
    """

    def __init__(self, layers: Sequence[DenseLayer]) -> None:
        self.layers = layers
        # Below the first layer that is trained nobody wants a gradient.
        self.first = next(i for i, layer in enumerate(layers) if layer.weight or layer.bias)
        self.activations = [
            None if layer.activation is None else ACTIVATIONS[layer.activation] for layer in layers
        ]
        self._shapes = shapes_of(layers)
        self._batches: dict[int, DenseBatch | None] = {}
        self._views: tuple[Tensor, list[LayerParameters]] | None = None

    def forward(self, theta: Tensor, x: Tensor) -> Pass:
        """Go through the layers at ``theta [1, D]`` with inputs ``x [B, in]``."""
        compiled = self._compiled(theta, x)
        if compiled is not None and compiled.takes(theta, x):
            return CompiledPass(self, compiled, theta, x, compiled.forward(theta, x))
        values = [x]
        for (_, by_input, bias), activation in zip(
            self.parameters(theta), self.activations, strict=True
        ):
            h = values[-1]
            h = torch.mm(h, by_input) if bias is None else torch.addmm(bias, h, by_input)
            values.append(h if activation is None else activation[0](h))
        return EagerPass(self, theta, values)

    def _compiled(self, theta: Tensor, x: Tensor) -> DenseBatch | None:
        batch = x.shape[0]
        if batch not in self._batches:
            shapes = self._shapes
            self._batches[batch] = None if shapes is None else batch_of(shapes, batch, theta)
        return self._batches[batch]

    def forget(self) -> None:
        """Release the row whose parameters were asked for last."""
        self._views = None

    def subtract(
        self, factors: Sequence[LayerFactors], theta: Tensor, rate: float, out: Tensor
    ) -> None:
        """``theta [1, D] - rate * gradient`` of these factors, into ``out``."""
        old, new = self.parameters(theta), self.parameters(out)
        for i, x, delta in factors:
            layer, by_output = self.layers[i], delta.t()
            if layer.weight is not None:
                torch.addmm(old[i].weight, by_output, x, alpha=-rate, out=new[i].weight)
            bias, new_bias = old[i].bias, new[i].bias
            if layer.bias is not None and bias is not None and new_bias is not None:
                # As a product: the compiled pass follows its order of sums, which `sum` has not.
                ones = delta.new_ones(len(delta))
                torch.addmv(bias, by_output, ones, alpha=-rate, out=new_bias)

    def inner(self, one: Sequence[LayerFactors], other: Sequence[LayerFactors]) -> Tensor:
        """Inner products of the examples' gradients, from two batches' factors, ``[B, B]``."""
        return inner_products(self.trained(one), self.trained(other))

    def trained(self, factors: Sequence[LayerFactors]) -> list[Factor]:
        """Those of layers that are trained, with where these lie in a row."""
        layers = [(self.layers[i], x, delta) for i, x, delta in factors]
        return [
            Factor(x, delta, layer.weight, layer.bias)
            for layer, x, delta in layers
            if layer.weight or layer.bias
        ]

    def parameters(self, theta: Tensor) -> list[LayerParameters]:
        """Parameters of each layer at ``theta [1, D]``."""
        # Most algorithms take one step after another in the same tensor.
        if self._views is None or self._views[0] is not theta:
            views = []
            for layer in self.layers:
                weight, bias = layer.parameters(theta)
                views.append(
                    LayerParameters(weight[0], weight[0].t(), None if bias is None else bias[0, 0])
                )
            self._views = theta, views
        return self._views[1]


@dataclass(slots=True)
class CompiledPass:
    """A batch's pass through the layers at one point: all of them in one call of a `DenseBatch`."""

    dense: DenseLayers
    batch: DenseBatch
    point: Tensor
    x: Tensor
    buffer: Tensor

    @property
    def outputs(self) -> Tensor:
        """Of the last layer, ``[B, K]``."""
        return self.batch.outputs(self.buffer)

    def backward(self, delta: Tensor, *, below: bool) -> Tensor | None:
        """Go back from the gradient of the outputs; ``below``: to that of the inputs."""
        return self.batch.backward(self.point, self.buffer, delta.contiguous(), below=below)

    @property
    def factors(self) -> Sequence[LayerFactors]:
        """Of each layer, the last layer's first."""
        values = [self.x]
        values += [self.batch.values(self.buffer, i) for i in range(len(self.batch.shapes) - 1)]
        last_first = range(len(values) - 1, -1, -1)
        return [LayerFactors(i, values[i], self.batch.deltas(self.buffer, i)) for i in last_first]

    def subtract_from(self, theta: Tensor, rate: float, out: Tensor) -> None:
        """``theta [1, D] - rate * gradient`` of these layers, into ``out``."""
        if self.batch.takes(theta, out):
            self.batch.update(theta, out, self.x, self.buffer, -rate)
        else:
            self.dense.subtract(self.factors, theta, rate, out)

    def inner(self, other: Pass) -> Tensor:
        """Inner products of the examples' gradients with those of another batch, ``[B, B]``."""
        # In one call, where both lie in buffers of one shape.
        if isinstance(other, CompiledPass) and other.batch is self.batch:
            return self.batch.inner((self.x, self.buffer), (other.x, other.buffer))
        return self.dense.inner(self.factors, other.factors)

    def scaled(self, factor: Tensor) -> CompiledPass:
        """The same pass, with a gradient times ``factor [1]``."""
        buffer = self.buffer.clone()
        for i in range(len(self.batch.shapes)):
            self.batch.deltas(buffer, i).mul_(factor)
        return replace(self, buffer=buffer)


@dataclass(frozen=True)
class EagerPass:
    """A batch's pass through the layers at one point, operation by operation.

    Attributes
    ----------
    dense : DenseLayers
    point : Tensor ``[1, D]``
    values : list of Tensor
        Inputs of every layer, and the outputs.
    factors : list of LayerFactors
        Filled by `backward`.
    """

    dense: DenseLayers
    point: Tensor
    values: Sequence[Tensor]
    factors: list[LayerFactors] = field(default_factory=list)

    @property
    def outputs(self) -> Tensor:
        """Of the last layer, ``[B, K]``."""
        return self.values[-1]

    def backward(self, delta: Tensor, *, below: bool) -> Tensor | None:
        """Go back from the gradient of the outputs; ``below``: to that of the inputs."""
        parameters, last = self.dense.parameters(self.point), -1 if below else self.dense.first
        for i in range(len(parameters) - 1, -1, -1):
            activation = self.dense.activations[i]
            if activation is not None:
                delta = activation[1](delta, self.values[i + 1])
            self.factors.append(LayerFactors(i, self.values[i], delta))
            # Nobody asked for the gradient of what lies below.
            if i == last:
                return None
            delta = torch.mm(delta, parameters[i].weight)
        return delta

    def subtract_from(self, theta: Tensor, rate: float, out: Tensor) -> None:
        """``theta [1, D] - rate * gradient`` of these layers, into ``out``."""
        self.dense.subtract(self.factors, theta, rate, out)

    def inner(self, other: Pass) -> Tensor:
        """Inner products of the examples' gradients with those of another batch, ``[B, B]``."""
        return self.dense.inner(self.factors, other.factors)

    def scaled(self, factor: Tensor) -> EagerPass:
        """The same pass, with a gradient times ``factor [1]``."""
        scaled = [share._replace(delta=share.delta * factor) for share in self.factors]
        return replace(self, factors=scaled)


Pass = CompiledPass | EagerPass

"""A batch's way through one client's dense layers and back: in three calls, or launch by launch.

Both give the same bytes: see `fedsim.compiled.dense`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedsim.clients.gradients import Factor, inner
from fedsim.compiled.dense import batch_of
from fedsim.compiled.dense_calls import DenseBatch
from fedsim.training.paths.layers import ACTIVATIONS, DenseLayer, shapes_of

__all__ = ["DenseLayers", "LayerFactors", "Pass"]


class LayerFactors(NamedTuple):
    """A layer's share of a gradient: ``delta^T x``, of ``delta [B, out]`` and ``x [B, in]``."""

    layer: int
    x: Tensor
    delta: Tensor


class Pass(Protocol):
    """A batch's way through the layers at one point."""

    @property
    def outputs(self) -> Tensor:
        """Of the last layer, ``[B, K]``."""

    def backward(self, delta: Tensor, *, below: bool) -> Tensor | None:
        """Go back from the gradient of the outputs; ``below``: to that of the inputs."""

    @property
    def factors(self) -> Sequence[LayerFactors]:
        """Of the trained layers and those above, the last layer's first."""

    def subtract_from(self, theta: Tensor, rate: float, out: Tensor) -> None:
        """``theta [1, D] - rate * gradient`` of these layers, into ``out``."""

    def inner(self, other: Pass) -> Tensor:
        """Inner products of the examples' gradients with those of another batch, ``[B, B]``."""

    def scaled(self, factor: Tensor) -> Pass:
        """The same, with a gradient times ``factor [1]``."""


class Viewed(NamedTuple):
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
        self._views: tuple[Tensor, list[Viewed]] | None = None

    def forward(self, theta: Tensor, x: Tensor) -> Pass:
        """Go through the layers at ``theta [1, D]`` with inputs ``x [B, in]``."""
        compiled = self._compiled(theta, x)
        if compiled is not None and compiled.takes(theta, x):
            return CompiledPass(self, compiled, theta, x, compiled.forward(theta, x))
        values = [x]
        for (_, by_input, bias), activation in zip(
            self.viewed(theta), self.activations, strict=True
        ):
            h = values[-1]
            h = torch.mm(h, by_input) if bias is None else torch.addmm(bias, h, by_input)
            values.append(h if activation is None else activation[0](h))
        return LaunchedPass(self, theta, values)

    def _compiled(self, theta: Tensor, x: Tensor) -> DenseBatch | None:
        batch = x.shape[0]
        if batch not in self._batches:
            shapes = self._shapes
            self._batches[batch] = None if shapes is None else batch_of(shapes, batch, theta)
        return self._batches[batch]

    def leave(self) -> None:
        """Let go of the parameters that were viewed last."""
        self._views = None

    def subtract(
        self, factors: Sequence[LayerFactors], theta: Tensor, rate: float, out: Tensor
    ) -> None:
        """``theta [1, D] - rate * gradient`` of these factors, into ``out``."""
        old, new = self.viewed(theta), self.viewed(out)
        for i, x, delta in factors:
            layer, by_output = self.layers[i], delta.t()
            if layer.weight is not None:
                torch.addmm(old[i].weight, by_output, x, alpha=-rate, out=new[i].weight)
            bias, new_bias = old[i].bias, new[i].bias
            if layer.bias is not None and bias is not None and new_bias is not None:
                ones = delta.new_ones(len(delta))
                torch.addmv(bias, by_output, ones, alpha=-rate, out=new_bias)

    def inner(self, one: Sequence[LayerFactors], other: Sequence[LayerFactors]) -> Tensor:
        """See `Pass`."""
        return inner(self.trained(one), self.trained(other))

    def trained(self, factors: Sequence[LayerFactors]) -> list[Factor]:
        """Those of layers that are trained, with where these lie in a row."""
        layers = [(self.layers[i], x, delta) for i, x, delta in factors]
        return [
            Factor(x, delta, layer.weight, layer.bias)
            for layer, x, delta in layers
            if layer.weight or layer.bias
        ]

    def viewed(self, theta: Tensor) -> list[Viewed]:
        """Parameters of each layer at ``theta [1, D]``."""
        # Most algorithms take one step after another in the same tensor.
        if self._views is None or self._views[0] is not theta:
            views = []
            for layer in self.layers:
                weight, bias = layer.parameters(theta)
                views.append(Viewed(weight[0], weight[0].t(), None if bias is None else bias[0, 0]))
            self._views = theta, views
        return self._views[1]


@dataclass(slots=True)
class CompiledPass:
    """All layers in one call: see `DenseBatch`."""

    dense: DenseLayers
    batch: DenseBatch
    point: Tensor
    x: Tensor
    buffer: Tensor

    @property
    def outputs(self) -> Tensor:
        """See `Pass`."""
        return self.batch.outputs(self.buffer)

    def backward(self, delta: Tensor, *, below: bool) -> Tensor | None:
        """See `Pass`."""
        return self.batch.backward(self.point, self.buffer, delta.contiguous(), below=below)

    @property
    def factors(self) -> Sequence[LayerFactors]:
        """See `Pass`."""
        values = [self.x]
        values += [self.batch.values(self.buffer, i) for i in range(len(self.batch.shapes) - 1)]
        last_first = range(len(values) - 1, -1, -1)
        return [LayerFactors(i, values[i], self.batch.deltas(self.buffer, i)) for i in last_first]

    def subtract_from(self, theta: Tensor, rate: float, out: Tensor) -> None:
        """See `Pass`."""
        if self.batch.takes(theta, out):
            self.batch.update(theta, out, self.x, self.buffer, -rate)
        else:
            self.dense.subtract(self.factors, theta, rate, out)

    def inner(self, other: Pass) -> Tensor:
        """See `Pass`."""
        if isinstance(other, CompiledPass) and other.batch is self.batch:
            return self.batch.inner((self.x, self.buffer), (other.x, other.buffer))
        return self.dense.inner(self.factors, other.factors)

    def scaled(self, factor: Tensor) -> CompiledPass:
        """See `Pass`."""
        buffer = self.buffer.clone()
        for i in range(len(self.batch.shapes)):
            self.batch.deltas(buffer, i).mul_(factor)
        return replace(self, buffer=buffer)


@dataclass(frozen=True)
class LaunchedPass:
    """Operation by operation.

    Attributes
    ----------
    dense : DenseLayers
    point : Tensor ``[1, D]``
    values : list of Tensor
        Inputs of every layer, and the outputs.
    factors : list of LayerFactors
        See `Pass`.
    """

    dense: DenseLayers
    point: Tensor
    values: Sequence[Tensor]
    factors: list[LayerFactors] = field(default_factory=list)

    @property
    def outputs(self) -> Tensor:
        """See `Pass`."""
        return self.values[-1]

    def backward(self, delta: Tensor, *, below: bool) -> Tensor | None:
        """See `Pass`."""
        parameters, last = self.dense.viewed(self.point), -1 if below else self.dense.first
        for i in range(len(parameters) - 1, -1, -1):
            activation = self.dense.activations[i]
            if activation is not None:
                delta = activation[1](delta, self.values[i + 1])
            self.factors.append(LayerFactors(i, self.values[i], delta))
            if i == last:
                return None
            delta = torch.mm(delta, parameters[i].weight)
        return delta

    def subtract_from(self, theta: Tensor, rate: float, out: Tensor) -> None:
        """See `Pass`."""
        self.dense.subtract(self.factors, theta, rate, out)

    def inner(self, other: Pass) -> Tensor:
        """See `Pass`."""
        return self.dense.inner(self.factors, other.factors)

    def scaled(self, factor: Tensor) -> LaunchedPass:
        """See `Pass`."""
        scaled = [share._replace(delta=share.delta * factor) for share in self.factors]
        return replace(self, factors=scaled)

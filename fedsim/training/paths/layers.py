"""Dense layers as a path sees them: linear layers one after another, each with an activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedsim.compiled.dense_calls import DenseShape
from fedsim.rows.elementwise import sigmoid_

__all__ = ["ACTIVATIONS", "DenseLayer", "covered", "dense_layers", "shapes_of"]

COMPILED = (None, nn.ReLU)
"""Activations of layers that are gone through in one call."""

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
    """What compiled functions are told of the layers; None where they do not take them."""
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

"""Convolutions, each with ReLU and max-pooling, forward and backward by hand.

Four things make this faster than autograd on the same operations. ReLU is monotone, so that it
commutes with max-pooling: it and its mask are taken after pooling, at a quarter of the size or
less. A place that is not the largest of its window has no gradient: sums run over the windows'
winners, not over all places (`fedsim.kernels.convolutions`). Nobody wants the gradient of an image,
so that the first layer's is never computed. And no graph is recorded.

It holds for a plain max-pooling without returned indices, and for ReLU alone: neither tanh after
an average, nor a pooling of other activations, commutes to the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.kernels.convolutions import (
    Patches,
    input_gradient,
    sums_over_winners,
    weight_gradient,
)
from fedsim.rows.packing import channels_last

# With so many places a window, sums over winners take less time than products over all places.
SPARSE = 3


@dataclass(frozen=True)
class ConvLayer:
    """A convolution, ReLU, and what pools them; all parameters are trained."""

    name: str
    module: nn.Conv2d
    pool: nn.MaxPool2d | None

    @property
    def parameters(self) -> list[str]:
        """Names of its parameters: weight, and bias where there is one."""
        names = [f"{self.name}.weight"]
        return names if self.module.bias is None else [*names, f"{self.name}.bias"]

    @property
    def geometry(self) -> tuple[Any, ...]:
        """Stride, padding and dilation."""
        return self.module.stride, self.module.padding, self.module.dilation


@dataclass(frozen=True)
class ConvActivations:
    """What a layer's backward pass needs of its forward pass."""

    x: Tensor
    weight: Tensor
    convolved: Tensor
    places: Tensor | None
    outputs: Tensor


def conv_stack(
    modules: Sequence[tuple[str, nn.Module]],
) -> tuple[list[ConvLayer], Sequence[tuple[str, nn.Module]]] | None:
    """The convolutions that a model begins with, and what follows; None where there are none.

    Each must be followed by ReLU and at most one max-pooling, in either order.
    """
    layers: list[ConvLayer] = []
    position = 0
    while position < len(modules) and type(modules[position][1]) is nn.Conv2d:
        name, module = modules[position]
        assert isinstance(module, nn.Conv2d)
        following = [m for _, m in modules[position + 1 : position + 3]]
        kinds = [type(m) for m in following]
        pool = next((m for m in following if isinstance(m, nn.MaxPool2d)), None)
        # Either order gives the same bits; a pooling further away does not belong to this
        # layer.
        if kinds not in ([nn.ReLU, nn.MaxPool2d], [nn.MaxPool2d, nn.ReLU]):
            pool = None
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        trained = all(parameter.requires_grad for parameter in module.parameters())
        if (kinds[:1] != [nn.ReLU] and pool is None) or not (plain and trained):
            return None
        if pool is not None and pool.return_indices:
            return None
        layers.append(ConvLayer(name, module, pool))
        position += 2 if pool is None else 3
    return (layers, modules[position:]) if layers else None


@dataclass(frozen=True)
class ConvStack:
    """Convolutional layers, one after another; ``compiled``: whether kernels are used."""

    layers: Sequence[ConvLayer]
    compiled: bool

    def forward(self, named: dict[str, Tensor], x: Tensor) -> tuple[Tensor, list[ConvActivations]]:
        """Outputs of images ``x [B, C, H, W]``, channels last, and what `backward` needs."""
        passed = []
        x = channels_last(x)
        for layer in self.layers:
            weight = channels_last(named[layer.parameters[0]])
            bias = named.get(f"{layer.name}.bias")
            stride, padding, dilation = layer.geometry
            convolved = F.conv2d(x, weight, bias, stride, padding, dilation, layer.module.groups)
            places, outputs = None, convolved
            if layer.pool is not None:
                # The places are the windows' winners, from which `_of_winners` takes the gradients.
                outputs, places = torch.ops.aten.max_pool2d_with_indices.default(
                    convolved, *_pooling(layer.pool)
                )
            outputs = torch.relu_(outputs)
            passed.append(ConvActivations(x, weight, convolved, places, outputs))
            x = outputs
        return x, passed

    def backward(self, delta: Tensor, passed: Sequence[ConvActivations]) -> dict[str, Tensor]:
        """Gradients by name, from that of the outputs."""
        gradients: dict[str, Tensor] = {}
        delta = channels_last(delta)
        for number in range(len(self.layers) - 1, -1, -1):
            layer, past = self.layers[number], passed[number]
            # ReLU's mask at the pooled size: no gradient goes through an output of 0.
            delta = torch.ops.aten.threshold_backward.default(delta, past.outputs, 0)
            # Which is faster depends on how much pooling throws away.
            gradient = _of_winners if self.compiled and _sparse(layer, past) else _of_places
            below, weight, bias = gradient(layer, past, delta, number > 0)
            gradients[layer.parameters[0]] = weight
            if bias is not None:
                gradients[layer.parameters[1]] = bias
            if below is not None:
                delta = below
        return gradients


def _sparse(layer: ConvLayer, past: ConvActivations) -> bool:
    """Whether a layer's gradients are taken from its windows' winners."""
    if layer.pool is None or layer.module.groups != 1 or layer.module.dilation != (1, 1):
        return False
    if past.x.is_cuda or not sums_over_winners(past.x.dtype):
        return False
    return past.convolved.numel() >= SPARSE * past.outputs.numel()


def _of_winners(
    layer: ConvLayer, past: ConvActivations, delta: Tensor, below: bool
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Gradients of the inputs, where they are wanted, of the weight, and of a bias."""
    module, places = layer.module, past.places
    assert places is not None
    assert not isinstance(module.padding, str)
    down, across = module.padding
    x = past.x.permute(0, 2, 3, 1)
    # The kernels know no padding: it is written out, and its gradient cut off at the end.
    if down or across:
        x = F.pad(x, (0, 0, across, across, down, down))
    x = x.contiguous()
    height, width, channels = x.shape[1:]
    kernel, stride = (module.kernel_size[0], module.kernel_size[1]), module.stride
    patches = _patches((height, width, channels), kernel, (stride[0], stride[1]))
    windows, places = (
        images.permute(0, 2, 3, 1).flatten(1, 2).contiguous() for images in (delta, places)
    )
    weights = weight_gradient(x, windows, places, patches)
    weights = weights.view(-1, *kernel, channels).permute(0, 3, 1, 2)
    bias = None if module.bias is None else windows.flatten(0, 1).sum(0)
    if not below:
        return None, weights, bias
    rows = past.weight.permute(0, 2, 3, 1).flatten(2)
    inputs = input_gradient(rows, windows, places, patches)
    inputs = inputs[:, down : height - down, across : width - across].permute(0, 3, 1, 2)
    return inputs, weights, bias


_patches = functools.cache(Patches)


def _of_places(
    layer: ConvLayer, past: ConvActivations, delta: Tensor, below: bool
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """The same, by products over all places."""
    if layer.pool is not None:
        delta = torch.ops.aten.max_pool2d_with_indices_backward.default(
            delta, past.convolved, *_pooling(layer.pool), past.places
        )
    module = layer.module
    biased = module.bias is not None
    gradients: tuple[Tensor | None, Tensor, Tensor | None] = (
        torch.ops.aten.convolution_backward.default(
            delta,
            past.x,
            past.weight,
            [module.out_channels] if biased else None,
            *layer.geometry,
            False,
            [0, 0],
            module.groups,
            [below, True, biased],
        )
    )
    return gradients


def _pooling(pool: nn.MaxPool2d) -> tuple[Any, ...]:
    """Kernel, stride, padding, dilation and rounding, as pairs."""
    pairs = (
        [value, value] if isinstance(value, int) else list(value)
        for value in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    return (*pairs, pool.ceil_mode)

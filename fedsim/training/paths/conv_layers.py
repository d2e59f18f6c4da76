"""Convolutions, each with ReLU and max-pooling: forward and backward passes without autograd.

Five things make this faster than autograd on the same operations. An image is convolved and pooled
in the cache (`fedsim.kernels.convolutions`). ReLU is monotone, so that it commutes with
max-pooling: it and its mask are computed after pooling, at a quarter of the size or less. An output
that is not the largest of its window has no gradient: sums run over the windows' winners, not over
all positions. Images need no gradient, so that the first layer's input gradient is never computed.
And no graph is recorded.

This requires plain max-pooling without returned indices, and ReLU: neither tanh after an average,
nor a pooling of other activations, commutes to the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.kernels.convolutions import (
    Patches,
    Windows,
    convolve_and_pool,
    input_gradient,
    is_compiled,
    weight_gradient,
)
from fedsim.models.memory_format import channels_last, takes_channels_last

# Convolution outputs per window times kernel size, from which on sums over winners take less time
# than products over all positions, on each processor that was measured. With AVX2 they take .3 to
# .65 of it (3 x 3 kernels pooled by 3 x 3 with stride 2, and 5 x 5 pooled by 2 x 2). Below this
# limit (3 x 3 pooled by 2 x 2) they take .35 to .8 with AVX2, but up to twice as long with AVX-512.
SPARSE = 40

Result = TypeVar("Result")
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of a layer's inputs, weight and bias; None for those that are not needed."""


@dataclass(frozen=True)
class ConvLayer:
    """A fully trained convolution with its ReLU and pooling, and its slices of a packed row."""

    name: str
    module: nn.Conv2d
    weight: slice
    bias: slice | None
    activation: type[nn.Module] | None = None
    pool: nn.MaxPool2d | None = None


def is_plain(module: nn.Conv2d) -> bool:
    """Whether a convolution pads with zeros, a given number of them on each side."""
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


@dataclass(frozen=True)
class ConvActivations:
    """What a layer's backward pass needs of its forward pass.

    Attributes
    ----------
    layer : ConvLayer
    x, weight : Tensor
        Its inputs and its weight, channels last.
    convolved : torch.Size
        Shape of the convolution's outputs, before pooling.
    winners : int64 Tensor or None
        Position of each window's winner (its largest output); None without pooling.
    outputs : Tensor
        After pooling and ReLU.
    """

    layer: ConvLayer
    x: Tensor
    weight: Tensor
    convolved: torch.Size
    winners: Tensor | None
    outputs: Tensor


class ConvFactor(NamedTuple):
    """Factors of a convolution's per-example gradients.

    Attributes
    ----------
    module : nn.Conv2d
    x : Tensor ``[B, C, H, W]``
        Its inputs.
    delta : Tensor ``[B, O, H', W']``
        Gradients of each example's loss with respect to its outputs.
    """

    module: nn.Conv2d
    x: Tensor
    delta: Tensor


def forward(
    layers: Sequence[ConvLayer], row: Tensor, x: Tensor, *, compiled: bool
) -> list[ConvActivations]:
    """Forward pass through the layers with images ``x [B, C, H, W]`` at a packed ``row [D]``.

    The last layer's outputs are the features, channels last.
    """
    activations = []
    placed = channels_last if takes_channels_last(layer.module for layer in layers) else torch.clone
    x = placed(x)
    for layer in layers:
        weight = placed(row[layer.weight].view(layer.module.weight.shape))
        bias = None if layer.bias is None else row[layer.bias]
        # Of each pooling window, from which `_gradients_of_winners` takes the gradients.
        pooled = _pooled_by_image if compiled and _has_kernels(layer, x) else _operations
        convolved, outputs, winners = pooled(layer, x, weight, bias)
        outputs = torch.relu_(outputs)
        activations.append(ConvActivations(layer, x, weight, convolved, winners, outputs))
        x = outputs
    return activations


def _has_kernels(layer: ConvLayer, x: Tensor) -> bool:
    """Whether the compiled kernels support a layer with such inputs; it must be pooled."""
    module, pool = layer.module, layer.pool
    if module.groups != 1 or module.dilation != (1, 1) or pool is None or pool.ceil_mode:
        return False
    return _pair(pool.dilation) == (1, 1) and not x.is_cuda and is_compiled(x.dtype)


Pooled = tuple[torch.Size, Tensor, Tensor | None]
"""Shape of the convolution's outputs, the pooled outputs, and the positions of the winners."""


def _pooled_by_image(layer: ConvLayer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Pooled:
    module, pool = layer.module, layer.pool
    assert pool is not None
    images, patches = _images(module, x)
    windows = Windows(_pair(pool.kernel_size), _pair(pool.stride), _pair(pool.padding))
    rows = weight.permute(0, 2, 3, 1).flatten(2)
    pooled = convolve_and_pool(images, rows, bias, patches, windows)
    outputs, winners = (images.permute(0, 3, 1, 2) for images in pooled)
    return torch.Size((len(x), module.out_channels, *patches.places)), outputs, winners


def _operations(layer: ConvLayer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Pooled:
    module, pool = layer.module, layer.pool
    convolved = F.conv2d(
        x, weight, bias, module.stride, module.padding, module.dilation, module.groups
    )
    if pool is None:
        return convolved.shape, convolved, None
    pooled = torch.ops.aten.max_pool2d_with_indices.default(convolved, *_pooling(pool))
    return (convolved.shape, *pooled)


def backward(
    layer_activations: Sequence[ConvActivations],
    delta: Tensor,
    of_layer: Callable[[ConvActivations, Tensor, bool], tuple[Tensor | None, Result]],
) -> list[Result]:
    """Backward pass from the gradient of the features; results of all layers, last layer first.

    ``of_layer`` gets the gradient of a layer's pooled outputs before ReLU, and whether to return
    the gradient of its inputs; it returns that and its result.
    """
    results = []
    input_delta: Tensor | None = channels_last(delta)
    for number in range(len(layer_activations) - 1, -1, -1):
        activations = layer_activations[number]
        assert input_delta is not None
        # ReLU's mask at the pooled size: no gradient goes through an output of 0.
        delta = torch.ops.aten.threshold_backward.default(input_delta, activations.outputs, 0)
        input_delta, result = of_layer(activations, delta, number > 0)
        results.append(result)
    return results


def gradients_by_name(
    activations: ConvActivations, delta: Tensor, with_inputs: bool, *, compiled: bool
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Gradients of a layer's inputs, if needed (``with_inputs``), and of its parameters by name."""
    # Which is faster depends on how much pooling discards.
    if compiled and _uses_winners(activations):
        inputs, weight, bias = _gradients_of_winners(activations, delta, with_inputs)
    else:
        delta = _before_pooling(activations, delta)
        inputs, weight, bias = _products(activations, delta, with_inputs, parameters=True)
    named = {f"{activations.layer.name}.weight": weight, f"{activations.layer.name}.bias": bias}
    return inputs, {name: part for name, part in named.items() if part is not None}


def conv_factor(
    activations: ConvActivations, delta: Tensor, with_inputs: bool
) -> tuple[Tensor | None, ConvFactor]:
    """Gradients of a layer's inputs, if needed, and the factors of per-example gradients."""
    delta = _before_pooling(activations, delta)
    inputs = _products(activations, delta, True, parameters=False)[0] if with_inputs else None
    return inputs, ConvFactor(activations.layer.module, activations.x, delta)


def _uses_winners(activations: ConvActivations) -> bool:
    """Whether a layer's gradients are computed from its windows' winners alone."""
    module = activations.layer.module
    if not _has_kernels(activations.layer, activations.x):
        return False
    kernel = module.kernel_size[0] * module.kernel_size[1]
    return activations.convolved.numel() * kernel >= SPARSE * activations.outputs.numel()


def _gradients_of_winners(
    activations: ConvActivations, delta: Tensor, with_inputs: bool
) -> Gradients:
    """Gradients of inputs (if needed), weight and bias, by sums over the windows' winners."""
    module, winners = activations.layer.module, activations.winners
    assert winners is not None
    images, patches = _images(module, activations.x)
    height, width, channels = patches.image
    windows, winners = (
        images.permute(0, 2, 3, 1).flatten(1, 2).contiguous() for images in (delta, winners)
    )
    weights = weight_gradient(images, windows, winners, patches)
    weights = weights.view(-1, *patches.kernel, channels).permute(0, 3, 1, 2)
    bias = None if module.bias is None else windows.flatten(0, 1).sum(0)
    if not with_inputs:
        return None, weights, bias
    rows = activations.weight.permute(0, 2, 3, 1).flatten(2)
    inputs = input_gradient(rows, windows, winners, patches)
    down, across = _padding(module)  # the kernels' images include it
    inputs = inputs[:, down : height - down, across : width - across].permute(0, 3, 1, 2)
    return inputs, weights, bias


def _images(module: nn.Conv2d, x: Tensor) -> tuple[Tensor, Patches]:
    """Images as the kernels take them, padded and channels last, and the patches to read."""
    down, across = _padding(module)
    x = x.permute(0, 2, 3, 1)
    if down or across:
        x = F.pad(x, (0, 0, across, across, down, down))
    x = x.contiguous()
    height, width, channels = x.shape[1:]
    return x, _patches((height, width, channels), _pair(module.kernel_size), _pair(module.stride))


def _padding(module: nn.Conv2d) -> tuple[int, int]:
    assert not isinstance(module.padding, str)  # see `is_plain`
    return _pair(module.padding)


_patches = functools.cache(Patches)


def _before_pooling(activations: ConvActivations, delta: Tensor) -> Tensor:
    """Gradients of the convolution's outputs, from those of the pooled outputs."""
    if activations.layer.pool is None:
        return delta
    # The operation reads the shape of its pooled input and no numbers: they were not kept.
    convolved = torch.empty(
        activations.convolved,
        dtype=delta.dtype,
        device=delta.device,
        memory_format=torch.channels_last,
    )
    gradients: Tensor = torch.ops.aten.max_pool2d_with_indices_backward.default(
        delta, convolved, *_pooling(activations.layer.pool), activations.winners
    )
    return gradients


def _products(
    activations: ConvActivations, delta: Tensor, with_inputs: bool, *, parameters: bool
) -> Gradients:
    """Gradients of inputs, weight and bias by products over all positions (torch's backward)."""
    module = activations.layer.module
    biased = module.bias is not None
    gradients: Gradients = torch.ops.aten.convolution_backward.default(
        delta,
        activations.x,
        activations.weight,
        [module.out_channels] if biased else None,
        module.stride,
        module.padding,
        module.dilation,
        False,
        [0, 0],
        module.groups,
        [with_inputs, parameters, parameters and biased],
    )
    return gradients


def _pooling(pool: nn.MaxPool2d) -> tuple[Any, ...]:
    """Kernel, stride, padding, dilation and rounding, as torch's operations take them."""
    sides = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    return (*map(_pair, sides), pool.ceil_mode)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])

"""The named networks: fully connected networks, and those of Koskela and Honkela."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from fedsim.errors import FedsimError
from fedsim.lazy import torch
from fedsim.process import refuse_larger_than_memory
from fedsim.registry import register
from fedsim.settings import Doc, Text, check_settings

if TYPE_CHECKING:
    from torch import nn


DEEPEST, WIDEST = 1000, 10_000_000

# AdadpCIFAR: channels of a convolution, hidden units, and the smallest image side it can take.
CHANNELS, HIDDEN, MIN_SIDE = 64, 500, 13

Bias = Annotated[bool, Doc("Whether fully connected layers have biases.")]


class Network(ABC):
    """Builds a network for data of a given shape. Subclasses are frozen dataclasses."""

    def __post_init__(self) -> None:
        check_settings(self, "model.")

    @abstractmethod
    def __call__(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Build it for examples of this shape."""


class DenseNetwork(Network):
    """Flatten, then `fully_connected` from the examples' size to the number of classes."""

    widths: tuple[int, ...]
    bias: bool

    def __call__(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Build it for examples of this shape."""
        sizes = (math.prod(input_shape), *self.widths, num_classes)
        parameters = sum(inputs * outputs for inputs, outputs in pairwise(sizes))
        refuse_larger_than_memory(
            4 * parameters,
            f"a model with layers of {', '.join(map(str, sizes))} (the data's size, model.widths, "
            "the number of classes)",
        )
        return torch.nn.Sequential(
            OrderedDict(flatten=torch.nn.Flatten(), **fully_connected(sizes, bias=self.bias))
        )


def fully_connected(sizes: Sequence[int], *, bias: bool) -> dict[str, nn.Module]:
    """Linear layers ``fc1``, ``fc2``, ... of these sizes with ReLUs between them, by name."""
    layers: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        if i > 1:
            layers[f"relu{i - 1}"] = torch.nn.ReLU()
        layers[f"fc{i}"] = torch.nn.Linear(inputs, outputs, bias=bias)
    return layers


def write_widths(widths: Sequence[int]) -> str:
    """Write widths in the form that `parse_widths` reads."""
    return ",".join(map(str, widths))


def parse_widths(widths: str | int | Sequence[int]) -> tuple[int, ...]:
    """Hidden units of each layer, from ``"256,256"``, a single number, or a sequence.

    Raises
    ------
    FedsimError
        If there are none or too many, or one is not a whole number from 1 to `WIDEST`.
    """
    if isinstance(widths, int):
        widths = str(widths)
    pieces = widths.strip("[] ").split(",") if isinstance(widths, str) else widths
    try:
        parsed = tuple(int(str(piece)) for piece in pieces)  # int(2.7) would be 2
    except (ValueError, TypeError):
        parsed = ()
    if not parsed or min(parsed) < 1 or len(parsed) > DEEPEST or max(parsed) > WIDEST:
        raise FedsimError(
            f"model.widths is {str(widths)[:100]!r}; it must give each layer's hidden units, for "
            f"at most {DEEPEST:,} layers: whole numbers from 1 to {WIDEST:,}, separated by commas, "
            "such as '256,256'."
        )
    return parsed


@register("model", "softmax")
@dataclass(frozen=True)
class Softmax(DenseNetwork):
    """One fully connected layer, ``fc1``."""

    widths = ()
    bias: Bias = True


@register("model", "mlp")
@dataclass(frozen=True)
class MLP(DenseNetwork):
    """Fully connected network: ``fc1``, ReLU, ``fc2``, ReLU, ... with layers of these widths."""

    widths: Annotated[tuple[int, ...], Text(parse_widths, write_widths)]
    """Hidden units of each layer, such as '256,256'."""
    bias: Bias = True


@register("model", "adadp-mnist")
@dataclass(frozen=True)
class AdadpMNIST(DenseNetwork):
    """Three hidden layers of 256 and no biases, 334,336 parameters on 28x28 images.

    Source: arXiv 1809.03832.
    """

    widths = (256, 256, 256)
    bias: Bias = False


@register("model", "adadp-cifar")
@dataclass(frozen=True)
class AdadpCIFAR(Network):
    """Two 3x3 convolutions, each with ReLU and 3/2 max-pooling, then 500, 500, classes.

    The convolutions always have biases (which gives the paper's 38,720 parameters on three
    channels), the fully connected layers if ``bias`` is set: 1600-500-500-10 on 32x32 images.

    Source: arXiv 1809.03832.
    """

    bias: Bias = False

    def __call__(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Build it for images of this shape.

        Raises
        ------
        FedsimError
            If the examples are no images, or smaller than 13x13.
        """
        if len(input_shape) != 3 or min(input_shape[1:]) < MIN_SIDE:
            raise FedsimError(
                f"model.name is 'adadp-cifar', but one example has shape {tuple(input_shape)}; "
                f"this network needs images (C, H, W) of at least {MIN_SIDE}x{MIN_SIDE}."
            )
        nn = torch.nn
        channels, height, width = input_shape
        flat = CHANNELS * _side(_side(height)) * _side(_side(width))
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, CHANNELS, 3),
                conv1_relu=nn.ReLU(),
                conv1_pool=nn.MaxPool2d(3, 2),
                conv2=nn.Conv2d(CHANNELS, CHANNELS, 3),
                conv2_relu=nn.ReLU(),
                conv2_pool=nn.MaxPool2d(3, 2),
                flatten=nn.Flatten(),
                **fully_connected((flat, HIDDEN, HIDDEN, num_classes), bias=self.bias),
            )
        )


def _side(side: int) -> int:
    """Side of an image after a 3x3 convolution without padding and 3/2 pooling."""
    return (side - 2 - 3) // 2 + 1

"""Koskela and Honkela's CIFAR-10 network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedsim.errors import FedsimError
from fedsim.lazy import torch
from fedsim.models.dense import fully_connected
from fedsim.registry import register
from fedsim.settings import Doc

if TYPE_CHECKING:
    from torch import nn

__all__ = ["AdadpCIFAR"]

CHANNELS = 64
HIDDEN = 500
LEAST_SIDE = 13


@register("model", "adadp-cifar")
@dataclass(frozen=True)
class AdadpCIFAR:
    """Two 3x3 convolutions, each with ReLU and 3/2 max-pooling, then 500, 500, classes.

    The convolutions have biases always (that is what makes their 38,720 parameters on three
    channels), the fully connected layers where ``bias`` says so: 1600-500-500-10 on 32x32
    images.

    Source: arXiv 1809.03832.
    """

    bias: Annotated[bool, Doc("Whether fully connected layers have biases.")] = False

    def __call__(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Build it for images of this shape.

        Raises
        ------
        FedsimError
            If the examples are no images, or smaller than 13x13.
        """
        if len(input_shape) != 3 or min(input_shape[1:]) < LEAST_SIDE:
            raise FedsimError(
                f"model.name is 'adadp-cifar', but one example has shape {tuple(input_shape)}; "
                f"this network needs images (C, H, W) of at least {LEAST_SIDE}x{LEAST_SIDE}."
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

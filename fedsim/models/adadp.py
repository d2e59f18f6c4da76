"""Koskela and Honkela's CIFAR-10 network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fedsim.errors import FedsimError
from fedsim.models.dense import fully_connected

__all__ = ["adadp_cifar"]

_CHANNELS = 64
_HIDDEN = 500
_LEAST_SIDE = 13


def adadp_cifar(input_shape: Sequence[int], num_classes: int, *, bias: bool) -> nn.Sequential:
    """Build two 3x3 convolutions, each with ReLU and 3/2 max-pooling, then 500, 500, classes.

    The convolutions have biases always (that is what makes their 38,720 parameters on three
    channels), the fully connected layers where ``bias`` says so: 1600-500-500-10 on 32x32
    images.

    Source: arXiv 1809.03832.

    Raises
    ------
    FedsimError
        If the examples are no images, or smaller than 13x13.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < _LEAST_SIDE:
        raise FedsimError(
            f"model.name is 'adadp-cifar', but one example has shape {tuple(input_shape)}; this "
            f"network needs images (C, H, W) of at least {_LEAST_SIDE}x{_LEAST_SIDE}."
        )
    channels, height, width = input_shape
    flat = _CHANNELS * _side(_side(height)) * _side(_side(width))
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, _CHANNELS, 3),
            conv1_relu=nn.ReLU(),
            conv1_pool=nn.MaxPool2d(3, 2),
            conv2=nn.Conv2d(_CHANNELS, _CHANNELS, 3),
            conv2_relu=nn.ReLU(),
            conv2_pool=nn.MaxPool2d(3, 2),
            flatten=nn.Flatten(),
            **fully_connected((flat, _HIDDEN, _HIDDEN, num_classes), bias=bias),
        )
    )


def _side(side: int) -> int:
    """Side of an image after a 3x3 convolution without padding and 3/2 pooling."""
    return (side - 2 - 3) // 2 + 1

"""Koskela and Honkela's MNIST network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedsim.models.dense import dense
from fedsim.registry import register
from fedsim.settings import Doc

if TYPE_CHECKING:
    from torch import nn

__all__ = ["AdadpMNIST"]

WIDTHS = (256, 256, 256)


@register("model", "adadp-mnist")
@dataclass(frozen=True)
class AdadpMNIST:
    """Three hidden layers of 256 and no biases, 334,336 parameters on 28x28 images.

    Source: arXiv 1809.03832.
    """

    bias: Annotated[bool, Doc("Whether fully connected layers have biases.")] = False

    def __call__(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Build it for examples of this shape."""
        return dense(input_shape, WIDTHS, num_classes, bias=self.bias)

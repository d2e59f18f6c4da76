"""Softmax regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedsim.models.dense import dense
from fedsim.registry import register
from fedsim.settings import Doc

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Softmax"]


@register("model", "softmax")
@dataclass(frozen=True)
class Softmax:
    """One fully connected layer, ``fc1``."""

    bias: Annotated[bool, Doc("Whether fully connected layers have biases.")] = True

    def __call__(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Build it for examples of this shape."""
        return dense(input_shape, (), num_classes, bias=self.bias)

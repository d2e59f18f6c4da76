"""Multilayer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedsim.models.dense import dense, parse_widths, write_widths
from fedsim.registry import register
from fedsim.settings import Doc, Text

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MLP"]


@register("model", "mlp")
@dataclass(frozen=True)
class MLP:
    """``fc1``, ReLU, ``fc2``, ReLU, ... with layers of these widths."""

    widths: Annotated[
        tuple[int, ...],
        Text(parse_widths, write_widths),
        Doc("Hidden units of each layer, such as '256,256'."),
    ]
    bias: Annotated[bool, Doc("Whether fully connected layers have biases.")] = True

    def __call__(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Build it for examples of this shape."""
        return dense(input_shape, parse_widths(self.widths), num_classes, bias=self.bias)

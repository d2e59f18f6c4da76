"""Of numbers, with less weight on what is far off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsim.registry import register
from fedsim.tasks.losses.base import ExampleLoss, difference, mean_over

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AbsoluteError"]


@register("loss", "absolute-error")
@dataclass(frozen=True)
class AbsoluteError(ExampleLoss):
    """Mean of ``|output - target|`` over the targets of an example."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `ExampleLoss`."""
        counts, gap = difference(outputs, targets)
        return mean_over(gap.abs(), counts)

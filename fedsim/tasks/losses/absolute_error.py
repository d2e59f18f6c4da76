"""Of numbers, with less weight on what is far off."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.tasks.losses.base import ExampleLoss, difference, mean_over

__all__ = ["AbsoluteError"]


@register("loss", "absolute-error")
@dataclass(frozen=True)
class AbsoluteError(ExampleLoss):
    """Mean of ``|output - target|`` over the targets of an example."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `ExampleLoss`."""
        counts, gap = difference(outputs, targets)
        return mean_over(gap.abs(), counts)

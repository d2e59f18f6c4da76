"""Of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.tasks.losses.base import ExampleLoss, difference, mean_over

__all__ = ["SquaredError"]


@register("loss", "squared-error")
@dataclass(frozen=True)
class SquaredError(ExampleLoss):
    """Mean of ``(output - target)^2`` over the targets of an example."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `ExampleLoss`."""
        counts, gap = difference(outputs, targets)
        return mean_over(gap.square(), counts)

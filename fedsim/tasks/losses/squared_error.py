"""Of numbers."""

from __future__ import annotations

from torch import Tensor

from fedsim.registry import register
from fedsim.tasks.losses.base import difference, mean_over

__all__ = ["squared_error"]


@register("loss", "squared-error")
def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of ``(output - target)^2`` over the targets of an example: ``[B]``."""
    counts, gap = difference(outputs, targets)
    return mean_over(gap.square(), counts)

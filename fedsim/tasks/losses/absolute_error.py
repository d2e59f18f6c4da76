"""Of numbers, with less weight on what is far off."""

from __future__ import annotations

from torch import Tensor

from fedsim.registry import register
from fedsim.tasks.losses.base import difference, mean_over

__all__ = ["absolute_error"]


@register("loss", "absolute-error")
def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of ``|output - target|`` over the targets of an example: ``[B]``."""
    counts, gap = difference(outputs, targets)
    return mean_over(gap.abs(), counts)

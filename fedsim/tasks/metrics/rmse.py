"""Root mean squared error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.tasks.losses.base import like_targets
from fedsim.tasks.metrics.base import Metric
from fedsim.tasks.metrics.sums import ExactSum

__all__ = ["RMSE"]


@register("metric", "rmse")
@dataclass(frozen=True)
class RMSE(Metric):
    """Root of the mean of ``(output - target)^2`` over all targets that count."""

    higher_is_better: ClassVar[bool] = False

    def init(self) -> ExactSum:
        """Nothing seen."""
        return ExactSum()

    def update(self, state: ExactSum, outputs: Tensor, targets: Tensor) -> ExactSum:
        """More examples."""
        difference = like_targets(outputs, targets).double() - targets.double()
        return state + ExactSum.of(difference[~targets.isnan()].square())

    def merge(self, first: ExactSum, second: ExactSum) -> ExactSum:
        """Both."""
        return first + second

    def finish(self, state: ExactSum) -> float:
        """The root."""
        return math.sqrt(state.mean)

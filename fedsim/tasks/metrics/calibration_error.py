"""How far probabilities are from frequencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.settings import Doc, Ge
from fedsim.tasks.metrics.base import Metric, counted
from fedsim.tasks.metrics.sums import ExactSum

__all__ = ["CalibrationError"]


@register("metric", "calibration-error")
@dataclass(frozen=True)
class CalibrationError(Metric):
    """Expected calibration error of the largest probability.

    Targets are put by it into ``bins`` of equal width, and the distance between mean probability
    and accuracy is averaged over them (Naeini et al. 2015; Guo et al. 2017).
    """

    bins: Annotated[int, Ge(1), Doc("Into how many equal parts confidences are sorted.")] = 15
    higher_is_better: ClassVar[bool] = False

    def init(self) -> Sequence[Any]:
        """For each bin, the sum of the probabilities and how many predictions were right."""
        return [(ExactSum(), 0)] * self.bins

    def update(self, state: Sequence[Any], outputs: Tensor, targets: Tensor) -> Sequence[Any]:
        """More examples."""
        logits, classes = counted(outputs, targets)
        confidence, predicted = logits.double().softmax(-1).max(-1)
        right = predicted == classes
        # A bin holds its upper edge: (0, 1/bins], ..., (1 - 1/bins, 1].
        inside = (confidence * self.bins).ceil().long().clamp(1, self.bins) - 1
        seen = []
        for k in range(self.bins):
            mine = inside == k
            seen.append((ExactSum.of(confidence[mine]), int(right[mine].sum())))
        return self.merge(state, seen)

    def merge(self, first: Sequence[Any], second: Sequence[Any]) -> Sequence[Any]:
        """Both."""
        return [(a + b, m + n) for (a, m), (b, n) in zip(first, second, strict=True)]

    def finish(self, state: Sequence[Any]) -> float:
        """The mean distance, weighted by the targets in each bin."""
        count = sum(total.count for total, _ in state)
        if not count or any(total.bad for total, _ in state):
            return math.nan
        gaps = [abs(total.mean * total.count - right) for total, right in state if total.count]
        return math.fsum(gaps) / int(count)

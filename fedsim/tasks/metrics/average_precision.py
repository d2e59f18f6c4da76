"""Area under the curve of precision and recall."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedsim.registry import register
from fedsim.tasks.metrics.ranking import Ints, Ranking

__all__ = ["AveragePrecision"]


@register("metric", "average-precision")
@dataclass(frozen=True)
class AveragePrecision(Ranking):
    """Mean over the examples with the label of the precision at their score."""

    def _of(self, positives: Ints, negatives: Ints) -> float:
        found, asked = np.cumsum(positives), np.cumsum(positives + negatives)
        steps = (positives * (found / asked)).tolist()
        return math.fsum(steps) / int(positives.sum())

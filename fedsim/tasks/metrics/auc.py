"""Area under the ROC curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.registry import register
from fedsim.tasks.metrics.ranking import Ints, Ranking

__all__ = ["AUC"]


@register("metric", "auc")
@dataclass(frozen=True)
class AUC(Ranking):
    """Probability that an example with the label scores above one without; ties count half."""

    def _of(self, positives: Ints, negatives: Ints) -> float:
        above = np.cumsum(positives) - positives
        twice = int((negatives * (2 * above + positives)).sum())
        return twice / (2 * int(positives.sum()) * int(negatives.sum()))

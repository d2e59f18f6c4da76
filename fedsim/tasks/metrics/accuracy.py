"""Share of targets that are predicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.tasks.metrics.base import counted
from fedsim.tasks.metrics.hits import Hits, Ints

__all__ = ["Accuracy"]


@register("metric", "accuracy")
@dataclass(frozen=True)
class Accuracy(Hits):
    """Share of targets that have the largest logit; with one output, of its sign.

    Outputs ``[B, K]`` and classes ``[B]``, or one more axis in both: the positions of a sequence.
    """

    def update(self, state: Ints, outputs: Tensor, targets: Tensor) -> Ints:
        """More examples."""
        logits, classes = counted(outputs, targets)
        predicted = logits[:, 0] > 0 if logits.shape[1] == 1 else logits.argmax(-1)
        return self.merge(state, np.array([int((predicted == classes).sum()), len(classes)]))

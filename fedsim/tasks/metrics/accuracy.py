"""Share of targets that are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedsim.registry import register
from fedsim.settings import Doc
from fedsim.tasks.metrics.base import counted
from fedsim.tasks.metrics.top_k import TopK

__all__ = ["Accuracy"]

Ints = npt.NDArray[np.int64]


@register("metric", "accuracy")
@dataclass(frozen=True)
class Accuracy(TopK):
    """Share of targets that have the largest logit; with one output, of its sign.

    Outputs ``[B, K]`` and classes ``[B]``, or one more axis in both: the positions of a sequence.
    """

    k: Annotated[int, Doc("1: the largest logit is the one that counts.")] = 1

    def update(self, state: Ints, outputs: Tensor, targets: Tensor) -> Ints:
        """More examples."""
        logits, classes = counted(outputs, targets)
        predicted = logits[:, 0] > 0 if logits.shape[1] == 1 else logits.argmax(-1)
        return self.merge(state, np.array([int((predicted == classes).sum()), len(classes)]))

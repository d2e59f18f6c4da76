"""Precision and recall in one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Doc
from fedsim.tasks.losses.base import like_targets
from fedsim.tasks.metrics.base import Metric, counted

__all__ = ["F1"]

Ints = npt.NDArray[np.int64]


@register("metric", "f1")
@dataclass(frozen=True)
class F1(Metric):
    """``2 tp / (2 tp + fp + fn)``, of each class or label and then averaged.

    Classes ``[B]`` (or ``[B, L]``) are predicted by the largest logit, labels ``[B, K]`` of 0 and 1
    where theirs is above 0. ``"micro"`` of classes is the accuracy.
    """

    average: Annotated[
        Literal["macro", "micro"],
        Doc("The mean over classes or labels that occur, or one F1 of all of them together."),
    ] = "macro"

    def init(self) -> Ints:
        """Predicted and there, predicted, and there: ``[3, K]``."""
        return np.zeros((3, 0), dtype=np.int64)

    def update(self, state: Ints, outputs: Tensor, targets: Tensor) -> Ints:
        """More examples."""
        if targets.is_floating_point():
            logits = like_targets(outputs, targets)
            columns = (-1, targets.shape[-1] if targets.dim() > 1 else 1)
            logits, labels = logits.reshape(columns), targets.reshape(columns)
            there, predicted = labels == 1, (logits > 0) & ~labels.isnan()
        else:
            logits, classes = counted(outputs, targets)
            width = max(2, logits.shape[1])
            best = (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(-1)
            one_hot = torch.nn.functional.one_hot
            there, predicted = one_hot(classes, width) > 0, one_hot(best, width) > 0
        counts = [(there & predicted).sum(0), predicted.sum(0), there.sum(0)]
        return self.merge(state, torch.stack(counts).numpy())

    def merge(self, first: Ints, second: Ints) -> Ints:
        """Both."""
        if not first.size or not second.size:
            return first if first.size else second
        return np.add(first, second)

    def finish(self, state: Ints) -> float:
        """The average."""
        if self.average == "micro":
            state = state.sum(1, keepdims=True)
        both, either = 2 * state[0], state[1] + state[2]
        scores = [b / e for b, e in zip(both.tolist(), either.tolist(), strict=True) if e]
        return math.fsum(scores) / len(scores) if scores else math.nan

"""Metrics of predicted classes, and of their probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Doc, Ge
from fedsim.tasks.metrics import ExactSum, Mean, Metric, by_label, counted, predicted_classes

Ints = npt.NDArray[np.int64]


class Hits(Metric):
    """Right targets of all; subclasses say by `update` which are."""

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    def init(self) -> Ints:
        """Right ones, and all."""
        return np.zeros(2, dtype=np.int64)

    def merge(self, first: Ints, second: Ints) -> Ints:
        """Both."""
        return np.add(first, second)

    def finish(self, state: Ints) -> float:
        """Right ones of all."""
        hits, count = state.tolist()
        return hits / count if count else math.nan


@register("metric", "accuracy")
@dataclass(frozen=True)
class Accuracy(Hits):
    """Share of targets that have the largest logit; with one output, of its sign.

    Outputs ``[B, K]`` and classes ``[B]``, or one more axis in both: the positions of a sequence.
    """

    def update(self, state: Ints, outputs: Tensor, targets: Tensor) -> Ints:
        """More examples."""
        logits, classes = counted(outputs, targets)
        hits = int((predicted_classes(logits) == classes).sum())
        return self.merge(state, np.array([hits, len(classes)]))


@register("metric", "top-k")
@dataclass(frozen=True)
class TopK(Hits):
    """Share of targets that are among the ``k`` largest logits.

    Outputs ``[B, K]`` and classes ``[B]``, or one more axis in both: the positions of a sequence.
    With fewer classes than ``k`` every target is among them.
    """

    k: Annotated[int, Ge(1), Doc("How many of the largest logits are looked at.")] = 5

    def update(self, state: Ints, outputs: Tensor, targets: Tensor) -> Ints:
        """More examples."""
        logits, classes = counted(outputs, targets)
        best = logits.topk(min(self.k, logits.shape[-1]), dim=-1).indices
        hits = int((best == classes[:, None]).sum())
        return self.merge(state, np.array([hits, len(classes)]))


@register("metric", "f1")
@dataclass(frozen=True)
class F1(Metric):
    """``2 tp / (2 tp + fp + fn)``, of each class or label and then averaged.

    Classes ``[B]`` (or ``[B, L]``) are predicted by the largest logit, labels ``[B, K]`` of 0 and 1
    where theirs is above 0. ``"micro"`` of classes is the accuracy.
    """

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
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
            logits, labels = by_label(outputs, targets)
            actual, predicted = labels == 1, (logits > 0) & ~labels.isnan()
        else:
            logits, classes = counted(outputs, targets)
            width = max(2, logits.shape[1])
            one_hot = torch.nn.functional.one_hot
            actual = one_hot(classes, width) > 0
            predicted = one_hot(predicted_classes(logits), width) > 0
        counts = [(actual & predicted).sum(0), predicted.sum(0), actual.sum(0)]
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


@register("metric", "perplexity")
@dataclass(frozen=True)
class Perplexity(Mean):
    """``exp`` of the mean cross-entropy of all positions that count, each counting the same."""

    def update(self, state: ExactSum, outputs: Tensor, targets: Tensor) -> ExactSum:
        """More sequences."""
        logits, classes = counted(outputs, targets)
        losses = torch.nn.functional.cross_entropy(logits, classes, reduction="none")
        return state + ExactSum.of(losses)

    def finish(self, state: ExactSum) -> float:
        """The perplexity; infinite where it is too large for a number."""
        mean = state.mean
        return math.exp(mean) if not mean > 700 else math.inf


@register("metric", "calibration-error")
@dataclass(frozen=True)
class CalibrationError(Metric):
    """Expected calibration error of the largest probability.

    Targets are put by it into ``bins`` of equal width, and the distance between mean probability
    and accuracy is averaged over them (Naeini et al. 2015; Guo et al. 2017).
    """

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
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
        batch = []
        for k in range(self.bins):
            mine = inside == k
            batch.append((ExactSum.of(confidence[mine]), int(right[mine].sum())))
        return self.merge(state, batch)

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

"""Metrics of predicted classes and of class probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Doc, Ge
from fedsim.tasks.metrics import ExactSum, Mean, Metric, by_label, counted

Ints = npt.NDArray[np.int64]


class Hits(Metric):
    """Fraction of targets that are predicted correctly, as a subclass's `update` defines it.

    The state counts the correct targets and all targets, int64 ``[2]``.
    """

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    def init(self) -> Ints:
        """Zero counts."""
        return np.zeros(2, dtype=np.int64)

    def merge(self, first: Ints, second: Ints) -> Ints:
        """Sum of both counts."""
        return np.add(first, second)

    def finish(self, state: Ints) -> float:
        """Correct targets divided by all; NaN if there are none."""
        hits, count = state.tolist()
        return hits / count if count else math.nan


@register("metric", "accuracy")
@dataclass(frozen=True)
class Accuracy(Hits):
    """Share of targets that have the largest logit; with one output, of its sign.

    Outputs ``[B, K]`` and classes ``[B]``, or one more axis in both: the positions of a sequence.
    """

    def update(self, state: Ints, outputs: Tensor, targets: Tensor) -> Ints:
        """Counts after more examples."""
        logits, classes = counted(outputs, targets)
        hits = int((logits.argmax(-1) == classes).sum())
        return self.merge(state, np.array([hits, len(classes)]))


@register("metric", "top-k")
@dataclass(frozen=True)
class TopK(Hits):
    """Share of targets that are among the ``k`` largest logits.

    Outputs ``[B, K]`` and classes ``[B]``, or one more axis in both: the positions of a sequence.
    With fewer classes than ``k``, every target is.
    """

    k: Annotated[
        int, Ge(1), Doc("k: a prediction is correct if the target is among the k largest logits.")
    ] = 5

    def update(self, state: Ints, outputs: Tensor, targets: Tensor) -> Ints:
        """Counts after more examples."""
        logits, classes = counted(outputs, targets)
        best = logits.topk(min(self.k, logits.shape[-1]), dim=-1).indices
        hits = int((best == classes[:, None]).sum())
        return self.merge(state, np.array([hits, len(classes)]))


@register("metric", "f1")
@dataclass(frozen=True)
class F1(Metric):
    """``2 tp / (2 tp + fp + fn)``, of each class or label and then averaged.

    A class (targets ``[B]`` or ``[B, L]``) is predicted if it has the largest logit, a label
    (targets ``[B, K]`` of 0 and 1) if its logit is above 0. With classes, ``"micro"`` is the
    accuracy.
    """

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    average: Annotated[
        Literal["macro", "micro"],
        Doc(
            "'macro' for the mean over classes or labels that occur; 'micro' for one F1 of all "
            "of them together."
        ),
    ] = "macro"

    def init(self) -> Ints:
        """Counts ``[3, K]`` of true positives, predicted positives and actual positives; K is 0.

        K becomes known with the first examples.
        """
        return np.zeros((3, 0), dtype=np.int64)

    def update(self, state: Ints, outputs: Tensor, targets: Tensor) -> Ints:
        """Counts after more examples."""
        if targets.is_floating_point():
            logits, labels = by_label(outputs, targets)
            actual, predicted = labels == 1, (logits > 0) & ~labels.isnan()
        else:
            logits, classes = counted(outputs, targets)
            one_hot = partial(torch.nn.functional.one_hot, num_classes=logits.shape[1])
            actual, predicted = one_hot(classes) > 0, one_hot(logits.argmax(-1)) > 0
        counts = [(actual & predicted).sum(0), predicted.sum(0), actual.sum(0)]
        return self.merge(state, torch.stack(counts).numpy())

    def merge(self, first: Ints, second: Ints) -> Ints:
        """Sum of both counts."""
        if not first.size or not second.size:
            return first if first.size else second
        return np.add(first, second)

    def finish(self, state: Ints) -> float:
        """The averaged F1; NaN if no class or label occurs."""
        if self.average == "micro":
            state = state.sum(1, keepdims=True)
        both, either = 2 * state[0], state[1] + state[2]
        scores = [b / e for b, e in zip(both.tolist(), either.tolist(), strict=True) if e]
        return math.fsum(scores) / len(scores) if scores else math.nan


@register("metric", "perplexity")
@dataclass(frozen=True)
class Perplexity(Mean):
    """``exp`` of the mean cross-entropy over all positions that count, with equal weights."""

    def update(self, state: ExactSum, outputs: Tensor, targets: Tensor) -> ExactSum:
        """Sum of cross-entropies after more sequences."""
        logits, classes = counted(outputs, targets)
        losses = torch.nn.functional.cross_entropy(logits, classes, reduction="none")
        return state + ExactSum.of(losses)

    def finish(self, state: ExactSum) -> float:
        """The perplexity; infinite if it overflows."""
        mean = state.mean
        # `not >` instead of `<=`, so that a NaN mean gives NaN.
        return math.exp(mean) if not mean > 700 else math.inf


@register("metric", "calibration-error")
@dataclass(frozen=True)
class CalibrationError(Metric):
    """Expected calibration error of the largest probability.

    Targets are sorted by it into ``bins`` of equal width, and the distance between mean probability
    and accuracy is averaged over the bins (Naeini et al. 2015; Guo et al. 2017).
    """

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    bins: Annotated[int, Ge(1), Doc("The number of equally wide bins of confidences.")] = 15
    higher_is_better: ClassVar[bool] = False

    def init(self) -> Sequence[Any]:
        """Sum of the probabilities and number of correct predictions, for each bin."""
        return [(ExactSum(), 0)] * self.bins

    def update(self, state: Sequence[Any], outputs: Tensor, targets: Tensor) -> Sequence[Any]:
        """State after more examples."""
        logits, classes = counted(outputs, targets)
        confidence, predicted = logits.double().softmax(-1).max(-1)
        right = predicted == classes
        # A bin includes its upper edge: (0, 1/bins], ..., (1 - 1/bins, 1].
        inside = (confidence * self.bins).ceil().long().clamp(1, self.bins) - 1
        batch = []
        for k in range(self.bins):
            mine = inside == k
            batch.append((ExactSum.of(confidence[mine]), int(right[mine].sum())))
        return self.merge(state, batch)

    def merge(self, first: Sequence[Any], second: Sequence[Any]) -> Sequence[Any]:
        """Sum of both states, bin by bin."""
        return [(a + b, m + n) for (a, m), (b, n) in zip(first, second, strict=True)]

    def finish(self, state: Sequence[Any]) -> float:
        """Mean distance, weighted by the number of targets in each bin."""
        count = sum(total.count for total, _ in state)
        if not count or any(total.bad for total, _ in state):
            return math.nan
        gaps = [abs(total.mean * total.count - right) for total, right in state if total.count]
        return math.fsum(gaps) / int(count)

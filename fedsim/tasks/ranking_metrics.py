"""Ranking metrics: area under the ROC curve, and average precision.

They depend on the ranking of all examples, so their state holds all scores. They are averaged over
labels ``[B, K]``, or over one-against-rest labels of the classes; two classes are one label. A
label that all examples have, or none, is left out of the average.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.tasks.metrics import Metric, by_label, counted

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Scores = tuple[tuple[Floats, Floats], ...]
"""Scores and labels, each ``[m, K]``: one pair per update."""


class Ranking(Metric):
    """A metric of scores and labels 0 and 1 (NaN where a label does not count)."""

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    def init(self) -> Scores:
        """No scores."""
        return ()

    def update(self, state: Scores, outputs: Tensor, targets: Tensor) -> Scores:
        """Scores after more examples."""
        if targets.is_floating_point():
            scores, labels = outputs, targets
        else:
            logits, classes = counted(outputs, targets)
            if logits.shape[1] == 2:
                scores, labels = logits[:, 1] - logits[:, 0], classes
            else:
                # One against the rest ranks by the class's probability: logits of different
                # examples are not comparable.
                scores = logits.double().softmax(-1)
                labels = torch.nn.functional.one_hot(classes, logits.shape[1])
        scores, labels = by_label(scores, labels)
        return (*state, (scores.double().numpy(), labels.double().numpy()))

    def merge(self, first: Scores, second: Scores) -> Scores:
        """Scores of both."""
        return first + second

    def finish(self, state: Scores) -> float:
        """Average over the labels that some examples have and others do not."""
        if not state:
            return math.nan
        scores, labels = (np.concatenate(columns) for columns in zip(*state, strict=True))
        values = []
        for k in range(labels.shape[1]):
            known = ~np.isnan(labels[:, k])
            own, positive = scores[known, k], labels[known, k] == 1
            if not np.isfinite(own).all():
                return math.nan
            if positive.any() and not positive.all():
                values.append(self._of(*_by_score(own, positive)))
        return math.fsum(values) / len(values) if values else math.nan

    @abstractmethod
    def _of(self, positives: Ints, negatives: Ints) -> float:
        """The metric from the numbers of positives and negatives at each score, highest first."""


def _by_score(scores: Floats, positive: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Numbers of examples with and without the label at each distinct score, highest first."""
    distinct, which = np.unique(scores, return_inverse=True)
    counts = [
        np.bincount(which[mask], minlength=len(distinct))[::-1].astype(np.int64)
        for mask in (positive, ~positive)
    ]
    return counts[0], counts[1]


@register("metric", "auc")
@dataclass(frozen=True)
class AUC(Ranking):
    """Probability that an example with the label scores above one without; ties count half."""

    def _of(self, positives: Ints, negatives: Ints) -> float:
        # Twice the pairs in which the positive ranks above the negative; a tie counts once. Whole
        # numbers, so that the only rounding is that of the division.
        above = np.cumsum(positives) - positives
        twice = int((negatives * (2 * above + positives)).sum())
        return twice / (2 * int(positives.sum()) * int(negatives.sum()))


@register("metric", "average-precision")
@dataclass(frozen=True)
class AveragePrecision(Ranking):
    """Mean over the examples with the label of the precision at their score."""

    def _of(self, positives: Ints, negatives: Ints) -> float:
        found, ranked = np.cumsum(positives), np.cumsum(positives + negatives)
        steps = (positives * (found / ranked)).tolist()
        return math.fsum(steps) / int(positives.sum())

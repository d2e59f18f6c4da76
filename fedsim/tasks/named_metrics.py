"""The named metrics: of predicted classes and probabilities, of rankings, and of numbers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedsim.array_types import Floats, Ints
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Ge
from fedsim.tasks.losses import like_targets, times_and_events
from fedsim.tasks.metrics import MIN_BIT, ExactSum, Mean, Metric, Summed, by_label, counted


class Hits(Summed):
    """Fraction of targets that are predicted correctly, as a subclass's `update` defines it.

    The state counts the correct targets and all targets, int64 ``[2]``.
    """

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    def init(self) -> Ints:
        """Zero counts."""
        return np.zeros(2, dtype=np.int64)

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
        return state + np.array([hits, len(classes)], dtype=np.int64)


@register("metric", "top-k")
@dataclass(frozen=True)
class TopK(Hits):
    """Share of targets that are among the ``k`` largest logits.

    Outputs ``[B, K]`` and classes ``[B]``, or one more axis in both: the positions of a sequence.
    With fewer classes than ``k``, every target is.
    """

    k: Annotated[int, Ge(1)] = 5
    """k: a prediction is correct if the target is among the k largest logits."""

    def update(self, state: Ints, outputs: Tensor, targets: Tensor) -> Ints:
        """Counts after more examples."""
        logits, classes = counted(outputs, targets)
        best = logits.topk(min(self.k, logits.shape[-1]), dim=-1).indices
        hits = int((best == classes[:, None]).sum())
        return state + np.array([hits, len(classes)], dtype=np.int64)


@register("metric", "f1")
@dataclass(frozen=True)
class F1(Summed):
    """``2 tp / (2 tp + fp + fn)``, of each class or label and then averaged.

    A class (targets ``[B]`` or ``[B, L]``) is predicted if it has the largest logit, a label
    (targets ``[B, K]`` of 0 and 1) if its logit is above 0. With classes, ``"micro"`` is the
    accuracy.
    """

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    average: Literal["macro", "micro"] = "macro"
    """'macro' for the mean over classes or labels that occur; 'micro' for one F1 of all of them
    together."""

    def init(self) -> Ints:
        """Counts ``[3, K]`` of true positives, predicted positives and actual positives.

        K is 1 until the first examples, whose counts are added to each row's 0.
        """
        return np.zeros((3, 1), dtype=np.int64)

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
        return state + ExactSum.from_values(losses)

    def finish(self, state: ExactSum) -> float:
        """The perplexity; infinite if it overflows."""
        mean = state.mean
        # `not >` instead of `<=`, so that a NaN mean gives NaN.
        return math.exp(mean) if not mean > 700 else math.inf


@register("metric", "calibration-error")
@dataclass(frozen=True)
class CalibrationError(Summed):
    """Expected calibration error of the largest probability.

    Targets are sorted by it into ``bins`` of equal width, and the distance between mean probability
    and accuracy is averaged over the bins (Naeini et al. 2015; Guo et al. 2017).
    """

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    bins: Annotated[int, Ge(1)] = 15
    """The number of equally wide bins of confidences."""
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
            batch.append((ExactSum.from_values(confidence[mine]), int(right[mine].sum())))
        return self.merge(state, batch)

    def finish(self, state: Sequence[Any]) -> float:
        """Mean distance, weighted by the number of targets in each bin."""
        count = sum(total.count for total, _ in state)
        if not count or any(total.bad for total, _ in state):
            return math.nan
        gaps = [abs(total.mean * total.count - right) for total, right in state if total.count]
        return math.fsum(gaps) / int(count)


Scores = tuple[tuple[Floats, Floats], ...]
"""Scores and labels, each ``[m, K]``: one pair per update."""


class Ranking(Metric):
    """A metric of scores and labels 0 and 1 (NaN where a label does not count).

    It depends on the ranking of all examples, so that its state holds all scores. It is averaged
    over labels ``[B, K]``, or over one-against-rest labels of the classes; two classes are one
    label. A label that all examples have, or none, is left out of the average.
    """

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


@register("metric", "concordance")
@dataclass(frozen=True)
class Concordance(Metric):
    """Share of comparable pairs whose times are in the order of the model's first output.

    Targets ``[B, 2]`` are a time, and 1 if the event was seen then, else 0. A pair is comparable
    if the event was seen at the earlier time, or at one of two equal times; equal outputs count
    half. A larger output must mean a longer time, as the scale of the loss ``weibull`` does.
    Source: Harrell et al. 1982.
    """

    ends: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    def init(self) -> Scores:
        """No examples."""
        return ()

    def update(self, state: Scores, outputs: Tensor, targets: Tensor) -> Scores:
        """Outputs, and times and events, after more examples."""
        times, events = times_and_events(targets)
        scores = outputs.reshape(len(outputs), -1)[:, 0]
        known = ~(times.isnan() | events.isnan())
        observed = torch.stack([times, events], 1)[known]
        return (*state, (scores[known].double().numpy(), observed.double().numpy()))

    def merge(self, first: Scores, second: Scores) -> Scores:
        """Examples of both."""
        return first + second

    def finish(self, state: Scores) -> float:
        """Concordant pairs divided by comparable ones; NaN if there are none."""
        if not state:
            return math.nan
        scores, observed = (np.concatenate(columns) for columns in zip(*state, strict=True))
        if not np.isfinite(scores).all():
            return math.nan
        times, seen = observed[:, 0], observed[:, 1] == 1
        twice = comparable = 0
        for time, score in zip(times[seen].tolist(), scores[seen].tolist(), strict=True):
            others = scores[(times > time) | ((times == time) & ~seen)]
            comparable += len(others)
            twice += 2 * int((others > score).sum()) + int((others == score).sum())
        return twice / (2 * comparable) if comparable else math.nan


@register("metric", "rmse")
@dataclass(frozen=True)
class RMSE(Mean):
    """Root of the mean of ``(output - target)^2`` over all targets that count."""

    def update(self, state: ExactSum, outputs: Tensor, targets: Tensor) -> ExactSum:
        """Sum of squared errors after more examples."""
        difference = like_targets(outputs, targets).double() - targets.double()
        return state + ExactSum.from_values(difference[~targets.isnan()].square())

    def finish(self, state: ExactSum) -> float:
        """Root of the mean squared error."""
        return math.sqrt(state.mean)


Sums = Sequence[tuple[ExactSum, ExactSum, ExactSum]]


@register("metric", "r2")
@dataclass(frozen=True)
class R2(Summed):
    """``1 - sum (y - output)^2 / sum (y - mean y)^2``, averaged over the numbers of a vector.

    A number that is constant over all examples is left out of the average.
    """

    def init(self) -> Sums:
        """No sums yet; then, for each number of a target, those of squared errors, y and y^2."""
        return ()

    def update(self, state: Sums, outputs: Tensor, targets: Tensor) -> Sums:
        """Sums after more examples."""
        predicted, truth = (columns.double().numpy() for columns in by_label(outputs, targets))
        sums = []
        for p, y in zip(predicted.T, truth.T, strict=True):
            known = ~np.isnan(y)
            y = y[known]
            # The squares must be exact: rounded ones lose a small variance beside a large mean.
            squares = ExactSum.from_values(y * y) if _is_single(y) else _exact_squares(y)
            sums.append(
                (ExactSum.from_values((y - p[known]) ** 2), ExactSum.from_values(y), squares)
            )
        return self.merge(state, sums)

    def finish(self, state: Sums) -> float:
        """R2 averaged over the numbers of a target."""
        values = []
        for errors, total, squares in state:
            if errors.bad or total.bad:
                return math.nan
            # sum y^2 - (sum y)^2 / n in rational numbers, so that no digits cancel.
            unit = 1 << MIN_BIT
            variation = Fraction(squares.units, unit)
            if total.count:
                variation -= Fraction(total.units**2, total.count * unit * unit)
            if variation > 0:
                values.append(float(1 - Fraction(errors.units, unit) / variation))
        return math.fsum(values) / len(values) if values else math.nan


def _is_single(y: Floats) -> bool:
    """Whether all numbers are float32 ones, whose squares are exact in float64."""
    return bool((y.astype(np.float32) == y).all())


def _exact_squares(y: Floats) -> ExactSum:
    """Exact sum of the squares of float64 numbers."""
    # Veltkamp's splitting with 2^27 + 1: y = a + b, each of 26 bits, so that products are exact.
    a = (y * 134217729.0) - (y * 134217729.0 - y)
    b = y - a
    total = (
        ExactSum.from_values(a * a) + ExactSum.from_values(2 * a * b) + ExactSum.from_values(b * b)
    )
    return ExactSum(total.units, len(y), total.bad)

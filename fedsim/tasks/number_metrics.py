"""Metrics of predicted numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.tasks.losses import like_targets
from fedsim.tasks.metrics import LEAST_BIT, ExactSum, Mean, Metric, by_label


@register("metric", "rmse")
@dataclass(frozen=True)
class RMSE(Mean):
    """Root of the mean of ``(output - target)^2`` over all targets that count."""

    def update(self, state: ExactSum, outputs: Tensor, targets: Tensor) -> ExactSum:
        """Sum of squared errors after more examples."""
        difference = like_targets(outputs, targets).double() - targets.double()
        return state + ExactSum.of(difference[~targets.isnan()].square())

    def finish(self, state: ExactSum) -> float:
        """Root of the mean squared error."""
        return math.sqrt(state.mean)


Floats = npt.NDArray[np.float64]
Sums = Sequence[tuple[ExactSum, ExactSum, ExactSum]]


@register("metric", "r2")
@dataclass(frozen=True)
class R2(Metric):
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
            squares = ExactSum.of(y * y) if _is_single(y) else _exact_squares(y)
            sums.append((ExactSum.of((y - p[known]) ** 2), ExactSum.of(y), squares))
        return self.merge(state, sums)

    def merge(self, first: Sums, second: Sums) -> Sums:
        """Sums of the examples of both."""
        if not first or not second:
            return first or second
        return [(a + d, b + e, c + f) for (a, b, c), (d, e, f) in zip(first, second, strict=True)]

    def finish(self, state: Sums) -> float:
        """R2 averaged over the numbers of a target."""
        values = []
        for errors, total, squares in state:
            if errors.bad or total.bad:
                return math.nan
            # sum y^2 - (sum y)^2 / n in rational numbers, so that no digits cancel.
            unit = 1 << LEAST_BIT
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
    total = ExactSum.of(a * a) + ExactSum.of(2 * a * b) + ExactSum.of(b * b)
    return ExactSum(total.units, len(y), total.bad)

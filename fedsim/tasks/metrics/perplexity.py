"""How many classes a model might as well choose from at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.tasks.metrics.base import Metric, counted
from fedsim.tasks.metrics.sums import ExactSum

__all__ = ["Perplexity"]


@register("metric", "perplexity")
@dataclass(frozen=True)
class Perplexity(Metric):
    """``exp`` of the mean cross-entropy of all positions that count, each counting the same."""

    higher_is_better: ClassVar[bool] = False

    def init(self) -> ExactSum:
        """Nothing seen."""
        return ExactSum()

    def update(self, state: ExactSum, outputs: Tensor, targets: Tensor) -> ExactSum:
        """More sequences."""
        logits, classes = counted(outputs, targets)
        losses = torch.nn.functional.cross_entropy(logits, classes, reduction="none")
        return state + ExactSum.of(losses)

    def merge(self, first: ExactSum, second: ExactSum) -> ExactSum:
        """Both."""
        return first + second

    def finish(self, state: ExactSum) -> float:
        """The perplexity; infinite where it is too large for a number."""
        mean = state.mean
        return math.exp(mean) if not mean > 700 else math.inf

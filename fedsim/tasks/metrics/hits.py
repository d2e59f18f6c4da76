"""Metrics that are a share of the targets: so many right ones of so many."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedsim.tasks.metrics.base import Metric

__all__ = ["Hits", "Ints"]

Ints = npt.NDArray[np.int64]


class Hits(Metric):
    """Right targets of all; subclasses say by `update` which are."""

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

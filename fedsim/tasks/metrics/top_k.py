"""Share of targets that are among the largest logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.registry import register
from fedsim.settings import Doc
from fedsim.tasks.metrics.base import Metric, counted

__all__ = ["TopK"]

Ints = npt.NDArray[np.int64]


@register("metric", "top-k")
@dataclass(frozen=True)
class TopK(Metric):
    """Share of targets that are among the ``k`` largest logits.

    Outputs ``[B, K]`` and classes ``[B]``, or one more axis in both: the positions of a sequence.
    With fewer classes than ``k`` every target is among them.

    Parameters
    ----------
    k : int
    """

    k: Annotated[int, Doc("How many of the largest logits are looked at.")] = 5

    def __post_init__(self) -> None:
        if self.k < 1:
            raise FedsimError(f"the metric top-{self.k} must look at 1 class at least.")

    def init(self) -> Ints:
        """Right ones, and all."""
        return np.zeros(2, dtype=np.int64)

    def update(self, state: Ints, outputs: Tensor, targets: Tensor) -> Ints:
        """More examples."""
        logits, classes = counted(outputs, targets)
        best = logits.topk(min(self.k, logits.shape[-1]), dim=-1).indices
        hits = int((best == classes[:, None]).sum())
        return self.merge(state, np.array([hits, len(classes)]))

    def merge(self, first: Ints, second: Ints) -> Ints:
        """Both."""
        return np.add(first, second)

    def finish(self, state: Ints) -> float:
        """Right ones of all."""
        hits, count = state.tolist()
        return hits / count if count else math.nan

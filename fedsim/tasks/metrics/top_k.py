"""Share of targets that are among the largest logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.settings import Doc, Ge
from fedsim.tasks.metrics.base import counted
from fedsim.tasks.metrics.hits import Hits, Ints

__all__ = ["TopK"]


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

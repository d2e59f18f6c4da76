"""Of numbers: squared near the target, absolute far from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Doc, Gt
from fedsim.tasks.losses.base import ExampleLoss, difference, mean_over

__all__ = ["Huber"]


@register("loss", "huber")
@dataclass(frozen=True)
class Huber(ExampleLoss):
    """Mean of ``e^2 / 2`` where ``|e| <= delta``, and of ``delta (|e| - delta / 2)`` beyond.

    With e the output less the target, over the targets of an example. Source: Huber 1964.
    """

    delta: Annotated[float, Gt(0), Doc("Beyond it an error counts by its size alone.")] = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `ExampleLoss`."""
        counts, gap = difference(outputs, targets)
        losses = torch.nn.functional.huber_loss(
            gap, torch.zeros_like(gap), reduction="none", delta=self.delta
        )
        return mean_over(losses, counts)

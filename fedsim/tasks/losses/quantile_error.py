"""Of numbers whose quantile is wanted, and not their mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Doc, Gt, Lt
from fedsim.tasks.losses.base import ExampleLoss, difference, mean_over

__all__ = ["QuantileError"]


@register("loss", "quantile-error")
@dataclass(frozen=True)
class QuantileError(ExampleLoss):
    """Mean of ``max(-q e, (1 - q) e)``, e the output less the target, over an example's targets.

    Least where the output is the q-quantile of the targets. Source: Koenker and Bassett 1978.
    """

    quantile: Annotated[float, Gt(0), Lt(1), Doc("q: the share of targets below the output.")] = 0.5

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `ExampleLoss`."""
        counts, gap = difference(outputs, targets)
        losses = torch.maximum(-self.quantile * gap, (1 - self.quantile) * gap)
        return mean_over(losses, counts)

"""The loss of `fedsim.models.statistics_model`: its gradient is minus an example's row of sums."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.bounded_values import Moments
from fedsim.registry import register
from fedsim.tasks.losses import ExampleLoss


@register("loss", "statistics")
@dataclass(frozen=True)
class StatisticsLoss(ExampleLoss):
    """Minus the inner product of the model's sums with an example's row; for that model only."""

    low: float = 0.0
    """The lower end to which targets are clamped, if they are numbers."""
    high: float = 1.0
    """The upper end to which targets are clamped."""
    quantiles: bool = False
    """Whether histograms, and quantiles from them, are released."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Minus the inner product of sums and rows, ``[B]``."""
        inputs, sums = outputs[:, 0], outputs[:, 1:]
        if not sums.shape[1]:
            return -inputs
        if targets.is_floating_point():
            moments = Moments("targets", self.low, self.high, self.quantiles)
            rows = moments.encoded(targets.to(sums).reshape(len(targets), -1, 1)).flatten(1)
        else:
            classes = torch.arange(sums.shape[1], device=sums.device)
            rows = (targets[:, None] == classes).to(sums)
        if rows.shape != sums.shape:
            raise FedsimError(
                f"the model gives outputs {list(outputs.shape)} for targets {list(targets.shape)}; "
                "task.loss = 'statistics' goes with model.name = 'statistics' alone."
            )
        return -(inputs + (sums * rows).sum(1))

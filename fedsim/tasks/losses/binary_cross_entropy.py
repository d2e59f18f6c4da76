"""Of labels, any number of which an example may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Doc, Gt
from fedsim.tasks.losses.base import ExampleLoss, like_targets, mean_over

__all__ = ["BinaryCrossEntropy"]


@register("loss", "binary-cross-entropy")
@dataclass(frozen=True)
class BinaryCrossEntropy(ExampleLoss):
    """Cross-entropy of a logit and 0 or 1 for each label ``[B, K]``, or ``[B]``."""

    positive_weight: Annotated[
        float, Gt(0), Doc("How often a label counts that is there, where they are rare.")
    ] = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `ExampleLoss`; the mean over labels."""
        logits = like_targets(outputs, targets)
        targets = targets.to(logits)
        counts = ~targets.isnan()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            logits,
            torch.where(counts, targets, 0.0),
            reduction="none",
            pos_weight=None
            if self.positive_weight == 1
            else logits.new_tensor(self.positive_weight),
        )
        return mean_over(losses, counts)

"""Of labels, any number of which an example may have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.registry import register
from fedsim.tasks.losses.base import like_targets, mean_over

__all__ = ["binary_cross_entropy"]


@register("loss", "binary-cross-entropy")
def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of a logit and 0 or 1 for each label ``[B, K]``, or ``[B]``: ``[B]``."""
    logits = like_targets(outputs, targets)
    targets = targets.to(logits)
    counts = ~targets.isnan()
    losses = F.binary_cross_entropy_with_logits(
        logits, torch.where(counts, targets, 0.0), reduction="none"
    )
    return mean_over(losses, counts)

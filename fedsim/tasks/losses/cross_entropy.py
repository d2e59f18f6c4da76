"""Of classes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedsim.registry import register
from fedsim.tasks.losses.base import IGNORED, class_logits, mean_over

__all__ = ["cross_entropy"]


@register("loss", "cross-entropy")
def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits ``[B, K]`` and classes ``[B]``, or ``[B, L, K]`` and ``[B, L]``.

    Returns
    -------
    Tensor ``[B]``
        Over positions: the mean over those that count.

    Raises
    ------
    FedsimError
        If outputs and targets are not of these shapes.
    """
    logits = class_logits(outputs, targets)
    if targets.dim() == 1:
        return F.cross_entropy(logits, targets, reduction="none")
    flat = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return mean_over(flat.view(targets.shape), targets != IGNORED)

"""Losses: one number per example, so that padding and privacy can weigh them.

A loss takes ``(outputs [B, ...], targets [B, ...])`` to ``[B]``. Where an example has many targets
(the positions of a sequence, the labels of an image, the numbers of a vector), its loss is the mean
over those that count. A target that does not count is `IGNORED` among classes and NaN among
numbers, and adds nothing to the loss or to its gradient; an example none of whose targets counts
has the loss 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.errors import FedsimError

__all__ = [
    "IGNORED",
    "LOSSES",
    "Loss",
    "absolute_error",
    "binary_cross_entropy",
    "class_logits",
    "cross_entropy",
    "like_targets",
    "squared_error",
]

Loss = Callable[[Tensor, Tensor], Tensor]
"""``loss(outputs [B, ...], targets [B, ...]) -> [B]``: one loss for each example."""

IGNORED = -100
"""Stands in the place of a class that does not count, as in PyTorch."""


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
    return _mean_over(flat.view(targets.shape), targets != IGNORED)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of ``(output - target)^2`` over the targets of an example: ``[B]``."""
    counts, difference = _difference(outputs, targets)
    return _mean_over(difference.square(), counts)


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of ``|output - target|`` over the targets of an example: ``[B]``."""
    counts, difference = _difference(outputs, targets)
    return _mean_over(difference.abs(), counts)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of a logit and 0 or 1 for each label ``[B, K]``, or ``[B]``: ``[B]``."""
    logits = like_targets(outputs, targets)
    targets = targets.to(logits)
    counts = ~targets.isnan()
    losses = F.binary_cross_entropy_with_logits(
        logits, torch.where(counts, targets, 0.0), reduction="none"
    )
    return _mean_over(losses, counts)


LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    "squared-error": squared_error,
    "absolute-error": absolute_error,
    "binary-cross-entropy": binary_cross_entropy,
}


def class_logits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs, if they are logits ``[*targets.shape, K]`` for targets that are classes.

    Raises
    ------
    FedsimError
    """
    if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
        raise FedsimError(
            f"the model gives outputs {list(outputs.shape)} for targets {list(targets.shape)} of "
            f"dtype {targets.dtype}; what compares them (model.loss, model.metrics) takes logits "
            "[B, K] for classes [B], or [B, L, K] for classes [B, L] of positions."
        )
    return outputs


def like_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs in the shape of the targets, of which they differ by an axis of one at most.

    Raises
    ------
    FedsimError
        If there is not one number for each target.
    """
    if outputs.shape == targets.shape:
        return outputs
    if outputs.shape == (*targets.shape, 1):
        return outputs.squeeze(-1)
    raise FedsimError(
        f"the model gives outputs {list(outputs.shape)} for targets {list(targets.shape)}; what "
        "compares them (model.loss, model.metrics) takes one number for each target."
    )


def _difference(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets count, and the outputs less those; 0 where they do not."""
    outputs = like_targets(outputs, targets)
    targets = targets.to(outputs)
    counts = ~targets.isnan()
    # Not `(outputs - targets) * counts`: NaN times zero is NaN, in the gradient too.
    return counts, torch.where(counts, outputs - torch.where(counts, targets, 0.0), 0.0)


def _mean_over(losses: Tensor, counts: Tensor) -> Tensor:
    """Mean over the positions that count, ``[B]``; ``losses`` are 0 elsewhere or not looked at."""
    if losses.dim() == 1:
        return torch.where(counts, losses, 0.0)
    total = torch.where(counts, losses, 0.0).flatten(1).sum(1)
    return total / counts.flatten(1).sum(1).clamp_min(1)

"""What losses share: shapes, and which targets count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.settings import check_settings

__all__ = [
    "IGNORED",
    "ExampleLoss",
    "Loss",
    "class_logits",
    "difference",
    "like_targets",
    "mean_over",
]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss(outputs [B, ...], targets [B, ...]) -> [B]``: one loss for each example."""


class ExampleLoss(ABC):
    """A loss with settings. Subclasses are frozen dataclasses of them."""

    def __post_init__(self) -> None:
        check_settings(self, "task.")

    @abstractmethod
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example, ``[B]``."""


IGNORED = -100
"""Stands in the place of a class that does not count, as in PyTorch."""


def class_logits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs, if they are logits ``[*targets.shape, K]`` for targets that are classes.

    Raises
    ------
    FedsimError
    """
    if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
        raise FedsimError(
            f"the model gives outputs {list(outputs.shape)} for targets {list(targets.shape)} of "
            f"dtype {targets.dtype}; what compares them (task.loss, task.metrics) takes logits "
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
        "compares them (task.loss, task.metrics) takes one number for each target."
    )


def difference(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets count, and the outputs less those; 0 where they do not."""
    outputs = like_targets(outputs, targets)
    targets = targets.to(outputs)
    counts = ~targets.isnan()
    # Not `(outputs - targets) * counts`: NaN times zero is NaN, in the gradient too.
    return counts, torch.where(counts, outputs - torch.where(counts, targets, 0.0), 0.0)


def mean_over(losses: Tensor, counts: Tensor) -> Tensor:
    """Mean over the positions that count, ``[B]``; ``losses`` are 0 elsewhere or not looked at."""
    if losses.dim() == 1:
        return torch.where(counts, losses, 0.0)
    total = torch.where(counts, losses, 0.0).flatten(1).sum(1)
    return total / counts.flatten(1).sum(1).clamp_min(1)

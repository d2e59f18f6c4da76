"""Of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Doc, Ge, Lt
from fedsim.tasks.losses.base import IGNORED, ExampleLoss, class_logits, mean_over

__all__ = ["CrossEntropy"]


@register("loss", "cross-entropy")
@dataclass(frozen=True)
class CrossEntropy(ExampleLoss):
    """Cross-entropy of logits ``[B, K]`` and classes ``[B]``, or ``[B, L, K]`` and ``[B, L]``.

    With ``label_smoothing`` s an example is of its class to 1 - s, and of all K alike to s
    (Szegedy et al. 2016). Over positions it is the mean of those that count.
    """

    label_smoothing: Annotated[
        float, Ge(0), Lt(1), Doc("The share of an example that is of all classes alike.")
    ] = 0.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `ExampleLoss`.

        Raises
        ------
        FedsimError
            If outputs and targets are not of these shapes.
        """
        logits = class_logits(outputs, targets)
        flat = torch.nn.functional.cross_entropy(
            logits.flatten(0, -2),
            targets.flatten(),
            reduction="none",
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        )
        return (
            flat if targets.dim() == 1 else mean_over(flat.view(targets.shape), targets != IGNORED)
        )

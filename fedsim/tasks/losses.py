"""Losses and metrics: one number per example, so that padding and privacy can weigh them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Loss", "Metric", "accuracy", "cross_entropy"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""``loss(outputs [B, ...], targets [B, ...]) -> [B]``: one loss for each example."""

Metric = Callable[[Tensor, Tensor], Tensor]
"""``metric(outputs [B, ...], targets [B, ...]) -> [B]``; a client reports its mean."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits ``[B, K]`` and classes ``[B]``: ``[B]``."""
    return F.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest logit of ``[B, K]`` is the class ``[B]``, else 0."""
    return (outputs.argmax(-1) == targets).to(torch.get_default_dtype())

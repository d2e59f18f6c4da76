"""What is learnt: losses and metrics."""

from __future__ import annotations

from fedsim.tasks.losses import Loss, Metric, accuracy, cross_entropy

__all__ = ["Loss", "Metric", "accuracy", "cross_entropy"]

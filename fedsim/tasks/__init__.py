"""What is learnt: losses and metrics."""

from __future__ import annotations

from fedsim.tasks.classes import F1, Accuracy, CalibrationError, Perplexity, TopK
from fedsim.tasks.losses import (
    IGNORED,
    LOSSES,
    Loss,
    absolute_error,
    binary_cross_entropy,
    cross_entropy,
    squared_error,
)
from fedsim.tasks.metrics import ExactSum, MeanOf, Metric
from fedsim.tasks.names import METRICS, metric_named, metric_of
from fedsim.tasks.numbers import R2, RMSE
from fedsim.tasks.ranking import AUC, AveragePrecision

__all__ = [
    "AUC",
    "F1",
    "IGNORED",
    "LOSSES",
    "METRICS",
    "R2",
    "RMSE",
    "Accuracy",
    "AveragePrecision",
    "CalibrationError",
    "ExactSum",
    "Loss",
    "MeanOf",
    "Metric",
    "Perplexity",
    "TopK",
    "absolute_error",
    "binary_cross_entropy",
    "cross_entropy",
    "metric_named",
    "metric_of",
    "squared_error",
]

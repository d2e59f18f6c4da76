"""What is learnt: losses and metrics."""

from __future__ import annotations

from fedsim.tasks.losses import (
    IGNORED,
    Loss,
    absolute_error,
    binary_cross_entropy,
    cross_entropy,
    squared_error,
)
from fedsim.tasks.metrics.accuracy import Accuracy
from fedsim.tasks.metrics.auc import AUC
from fedsim.tasks.metrics.average_precision import AveragePrecision
from fedsim.tasks.metrics.base import MeanOf, Metric
from fedsim.tasks.metrics.calibration_error import CalibrationError
from fedsim.tasks.metrics.f1 import F1
from fedsim.tasks.metrics.f1_micro import F1Micro
from fedsim.tasks.metrics.perplexity import Perplexity
from fedsim.tasks.metrics.r2 import R2
from fedsim.tasks.metrics.rmse import RMSE
from fedsim.tasks.metrics.sums import ExactSum
from fedsim.tasks.metrics.top_k import TopK
from fedsim.tasks.names import loss_named, metric_named

__all__ = [
    "AUC",
    "F1",
    "IGNORED",
    "R2",
    "RMSE",
    "Accuracy",
    "AveragePrecision",
    "CalibrationError",
    "ExactSum",
    "F1Micro",
    "Loss",
    "MeanOf",
    "Metric",
    "Perplexity",
    "TopK",
    "absolute_error",
    "binary_cross_entropy",
    "cross_entropy",
    "loss_named",
    "metric_named",
    "squared_error",
]

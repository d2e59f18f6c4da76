"""Losses and metrics."""

from __future__ import annotations

from fedsim.arguments import explain_calls
from fedsim.tasks.losses import (
    IGNORED,
    AbsoluteError,
    BinaryCrossEntropy,
    CrossEntropy,
    ExampleLoss,
    Huber,
    Loss,
    QuantileError,
    SquaredError,
    Weibull,
    loss_of,
)
from fedsim.tasks.metrics import ExactSum, MeanOf, Metric, metric_of
from fedsim.tasks.named_metrics import (
    AUC,
    F1,
    R2,
    RMSE,
    Accuracy,
    AveragePrecision,
    CalibrationError,
    Concordance,
    Perplexity,
    TopK,
)

__all__ = [
    "AUC",
    "F1",
    "IGNORED",
    "R2",
    "RMSE",
    "AbsoluteError",
    "Accuracy",
    "AveragePrecision",
    "BinaryCrossEntropy",
    "CalibrationError",
    "Concordance",
    "CrossEntropy",
    "ExactSum",
    "ExampleLoss",
    "Huber",
    "Loss",
    "MeanOf",
    "Metric",
    "Perplexity",
    "QuantileError",
    "SquaredError",
    "TopK",
    "Weibull",
    "loss_of",
    "metric_of",
]

explain_calls(__name__)

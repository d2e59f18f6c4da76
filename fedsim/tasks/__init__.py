"""What is learnt: losses and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.lazy import names_of

if TYPE_CHECKING:
    from fedsim.tasks.losses.absolute_error import AbsoluteError
    from fedsim.tasks.losses.base import IGNORED, ExampleLoss, Loss
    from fedsim.tasks.losses.binary_cross_entropy import BinaryCrossEntropy
    from fedsim.tasks.losses.cross_entropy import CrossEntropy
    from fedsim.tasks.losses.huber import Huber
    from fedsim.tasks.losses.quantile_error import QuantileError
    from fedsim.tasks.losses.squared_error import SquaredError
    from fedsim.tasks.metrics.accuracy import Accuracy
    from fedsim.tasks.metrics.auc import AUC
    from fedsim.tasks.metrics.average_precision import AveragePrecision
    from fedsim.tasks.metrics.base import MeanOf, Metric
    from fedsim.tasks.metrics.calibration_error import CalibrationError
    from fedsim.tasks.metrics.f1 import F1
    from fedsim.tasks.metrics.perplexity import Perplexity
    from fedsim.tasks.metrics.r2 import R2
    from fedsim.tasks.metrics.rmse import RMSE
    from fedsim.tasks.metrics.sums import ExactSum
    from fedsim.tasks.metrics.top_k import TopK
    from fedsim.tasks.names import loss_of, metric_of

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
    "loss_of",
    "metric_of",
]

__getattr__ = names_of(__name__, __file__)

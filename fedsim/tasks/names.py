"""Metrics by their names in a config, and what of a user's own is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fedsim.errors import FedsimError
from fedsim.tasks.classes import F1, Accuracy, CalibrationError, Perplexity, TopK
from fedsim.tasks.metrics import MeanOf, Metric
from fedsim.tasks.numbers import R2, RMSE
from fedsim.tasks.ranking import AUC, AveragePrecision

__all__ = ["METRICS", "metric_named", "metric_of"]

METRICS: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "auc": AUC,
    "average-precision": AveragePrecision,
    "calibration-error": CalibrationError,
    "f1": F1,
    "f1-micro": lambda: F1("micro"),
    "perplexity": Perplexity,
    "r2": R2,
    "rmse": RMSE,
}
"""Metrics that have a name; ``top-K`` is another, for any whole number."""


def metric_named(name: str) -> Metric:
    """A metric by its name.

    Raises
    ------
    FedsimError
        If there is none of this name.
    """
    if name in METRICS:
        return METRICS[name]()
    if match := re.fullmatch(r"top-([0-9]{1,6})", name, re.ASCII):
        return TopK(int(match[1]))
    raise FedsimError(
        f"model.metrics has '{name}'; there are {', '.join(sorted(METRICS))}, top-K for a whole "
        "number K, and module:name for one of your own."
    )


def metric_of(thing: Any) -> Metric:
    """A metric of a user's own: a `Metric`, a class of them, or a function of outputs and targets.

    A function gives one number for each example, ``[B]``; the metric is their mean.
    """
    if isinstance(thing, type) and issubclass(thing, Metric):
        return thing()
    return thing if isinstance(thing, Metric) else MeanOf(thing)

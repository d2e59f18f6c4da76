"""Losses and metrics by their names in a config, and what of a user's own is a metric."""

from __future__ import annotations

import re
from typing import Any

from fedsim import registry
from fedsim.tasks.losses.base import Loss
from fedsim.tasks.metrics.base import MeanOf, Metric
from fedsim.tasks.metrics.top_k import TopK

__all__ = ["loss_named", "metric_named"]


def loss_named(name: str) -> Loss:
    """A loss by its name, or as ``module:name``.

    Raises
    ------
    FedsimError
        If there is none of this name.
    """
    return registry.find("loss", name, "model.loss")


def metric_named(name: str) -> Metric:
    """A metric by its name (``top-3`` is `TopK` of 3), or as ``module:name``.

    What is a user's own is a `Metric`, a class of them, or a function of outputs and targets that
    gives one number for each example, ``[B]``: the metric is their mean.

    Raises
    ------
    FedsimError
        If there is none of this name.
    """
    if match := re.fullmatch(r"top-([0-9]{1,6})", name, re.ASCII):
        return TopK(int(match[1]))
    thing: Any = registry.find("metric", name, "model.metrics")
    if isinstance(thing, type) and issubclass(thing, Metric):
        return thing()
    return thing if isinstance(thing, Metric) else MeanOf(thing)

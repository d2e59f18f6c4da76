"""Precision and recall in one, of all classes together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedsim.registry import register
from fedsim.tasks.metrics.f1 import F1

__all__ = ["F1Micro"]


@register("metric", "f1-micro")
@dataclass(frozen=True)
class F1Micro(F1):
    """`F1` of all classes or labels together; of classes, it is the accuracy."""

    average: Literal["macro", "micro"] = "micro"

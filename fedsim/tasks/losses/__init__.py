"""Losses: one number per example, so that padding and privacy can weigh them.

A loss takes ``(outputs [B, ...], targets [B, ...])`` to ``[B]``. Where an example has many targets
(the positions of a sequence, the labels of an image, the numbers of a vector), its loss is the mean
over those that count. A target that does not count is `IGNORED` among classes and NaN among
numbers, and adds nothing to the loss or to its gradient; an example none of whose targets counts
has the loss 0.
"""

from __future__ import annotations

from fedsim.tasks.losses.absolute_error import AbsoluteError
from fedsim.tasks.losses.base import IGNORED, ExampleLoss, Loss
from fedsim.tasks.losses.binary_cross_entropy import BinaryCrossEntropy
from fedsim.tasks.losses.cross_entropy import CrossEntropy
from fedsim.tasks.losses.huber import Huber
from fedsim.tasks.losses.quantile_error import QuantileError
from fedsim.tasks.losses.squared_error import SquaredError

__all__ = [
    "IGNORED",
    "AbsoluteError",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "ExampleLoss",
    "Huber",
    "Loss",
    "QuantileError",
    "SquaredError",
]

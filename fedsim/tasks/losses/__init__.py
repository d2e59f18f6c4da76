"""Losses: one number per example, so that padding and privacy can weigh them.

A loss takes ``(outputs [B, ...], targets [B, ...])`` to ``[B]``. Where an example has many targets
(the positions of a sequence, the labels of an image, the numbers of a vector), its loss is the mean
over those that count. A target that does not count is `IGNORED` among classes and NaN among
numbers, and adds nothing to the loss or to its gradient; an example none of whose targets counts
has the loss 0.
"""

from __future__ import annotations

from fedsim.tasks.losses.absolute_error import absolute_error
from fedsim.tasks.losses.base import IGNORED, Loss
from fedsim.tasks.losses.binary_cross_entropy import binary_cross_entropy
from fedsim.tasks.losses.cross_entropy import cross_entropy
from fedsim.tasks.losses.squared_error import squared_error

__all__ = [
    "IGNORED",
    "Loss",
    "absolute_error",
    "binary_cross_entropy",
    "cross_entropy",
    "squared_error",
]

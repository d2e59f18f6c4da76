"""The data set MNIST."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.datasets.vision import Published
from fedsim.registry import register

__all__ = ["MNIST"]


@register("data", "mnist")
@dataclass(frozen=True)
class MNIST(Published):
    """MNIST: 70,000 handwritten digits, 28x28 grey (LeCun et al. 1998)."""

    name, torchvision = "mnist", "MNIST"
    mean, std = (0.1307,), (0.3081,)

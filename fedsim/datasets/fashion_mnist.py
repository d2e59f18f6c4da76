"""The data set FashionMNIST."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.datasets.vision import Published
from fedsim.registry import register

__all__ = ["FashionMNIST"]


@register("data", "fashion-mnist")
@dataclass(frozen=True)
class FashionMNIST(Published):
    """Fashion-MNIST: 70,000 articles of clothing, 28x28 grey (Xiao et al. 2017)."""

    name, torchvision = "fashion-mnist", "FashionMNIST"
    mean, std = (0.2860,), (0.3530,)

"""The data set CIFAR10."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.datasets.vision import Published
from fedsim.registry import register

__all__ = ["CIFAR10"]


@register("data", "cifar10")
@dataclass(frozen=True)
class CIFAR10(Published):
    """CIFAR-10: 60,000 photographs of ten things, 32x32 (Krizhevsky 2009)."""

    name, torchvision = "cifar10", "CIFAR10"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

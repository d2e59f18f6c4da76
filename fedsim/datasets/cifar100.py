"""The data set CIFAR100."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.datasets.vision import Published
from fedsim.registry import register

__all__ = ["CIFAR100"]


@register("data", "cifar100")
@dataclass(frozen=True)
class CIFAR100(Published):
    """CIFAR-100: 60,000 photographs of a hundred things, 32x32 (Krizhevsky 2009)."""

    name, torchvision = "cifar100", "CIFAR100"
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    classes = 100

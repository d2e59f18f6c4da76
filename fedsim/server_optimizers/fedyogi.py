"""FedYogi."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.moments import FirstOverRoot
from fedsim.settings import Doc, Gt

__all__ = ["FedYogi"]


@register("server", "fedyogi")
@dataclass
class FedYogi(FirstOverRoot):
    """FedYogi (Reddi et al. 2021): second moments that forget slowly; as Flower's strategy."""

    lr: Annotated[float, Gt(0), Doc("eta, the rate.")] = 0.01

    def squares(self, second: Tensor, update: Tensor) -> Tensor:
        """Moved towards the newest, by no more than that."""
        square = update.square()
        return second - (1 - self.beta2) * square * (second - square).sign()

"""FedAdam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.moments import FirstOverRoot
from fedsim.settings import Doc, Gt

__all__ = ["FedAdam"]


@register("server", "fedadam")
@dataclass
class FedAdam(FirstOverRoot):
    """FedAdam (Reddi et al. 2021) with Flower's correction of its first rounds."""

    lr: Annotated[float, Gt(0), Doc("eta, the rate.")] = 0.1

    def squares(self, second: Tensor, update: Tensor) -> Tensor:
        """Their moving average."""
        return (second * self.beta2).addcmul_(update, update, value=1 - self.beta2)

    @property
    def rate(self) -> float:
        """lr, corrected for means that began at zero."""
        # Flower counts one round more than there have been.
        told = self.steps + 1
        return float(self.lr * (1 - self.beta2**told) ** 0.5 / (1 - self.beta1**told))

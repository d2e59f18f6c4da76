"""FedAdagrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.moments import WithMoments, adagrad_step
from fedsim.settings import Doc, Gt

__all__ = ["FedAdagrad"]


@register("server", "fedadagrad")
@dataclass
class FedAdagrad(WithMoments):
    """FedAdagrad (Reddi et al. 2021): second moments that add up; as Flower's strategy."""

    lr: Annotated[float, Gt(0), Doc("eta, the rate.")] = 0.1
    tau: Annotated[float, Gt(0), Doc("Added to the root: how adaptive steps are.")] = 1e-3

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        return adagrad_step(self, vector, update, self.lr, self.tau)

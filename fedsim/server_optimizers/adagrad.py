"""Adagrad on the mean update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.moments import WithMoments, adagrad_step
from fedsim.settings import Doc, Gt

__all__ = ["ServerAdagrad"]


@register("server", "adagrad")
@dataclass
class ServerAdagrad(WithMoments):
    """Adagrad on the mean update; as `torch.optim.Adagrad`."""

    lr: Annotated[float, Gt(0), Doc("The rate.")] = 0.01
    eps: Annotated[float, Gt(0), Doc("Added to the root: nothing is divided by 0.")] = 1e-10

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        return adagrad_step(self, vector, update, self.lr, self.eps)

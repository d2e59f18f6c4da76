"""AdamW on the mean update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.adam import ServerAdam
from fedsim.settings import Doc, Ge

__all__ = ["ServerAdamW"]


@register("server", "adamw")
@dataclass
class ServerAdamW(ServerAdam):
    """Adam whose parameters decay by themselves (Loshchilov and Hutter 2019); as torch's."""

    weight_decay: Annotated[float, Ge(0), Doc("What of lr times a parameter is taken off.")] = 0.01

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        return super().step(vector * (1 - self.lr * self.weight_decay), update)

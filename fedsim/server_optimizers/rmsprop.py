"""RMSProp on the mean update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.moments import WithMoments
from fedsim.settings import Doc, Ge, Gt, Lt

__all__ = ["ServerRMSProp"]


@register("server", "rmsprop")
@dataclass
class ServerRMSProp(WithMoments):
    """RMSProp on the mean update; as `torch.optim.RMSprop`."""

    lr: Annotated[float, Gt(0), Doc("The rate.")] = 0.01
    decay: Annotated[float, Ge(0), Lt(1), Doc("Weight of the old mean of squares.")] = 0.99
    eps: Annotated[float, Gt(0), Doc("Added to the root: nothing is divided by 0.")] = 1e-8

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        update = update.to(vector.dtype)
        self.steps += 1
        second = self.moment("second", vector) * self.decay
        second.addcmul_(update, update, value=1 - self.decay)
        self.moments = {"second": second}
        return vector.addcdiv(update, second.sqrt().add_(self.eps), value=self.lr)

"""Adam on the mean update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.moments import WithMoments
from fedsim.settings import Doc, Ge, Gt, Lt

__all__ = ["ServerAdam"]


@register("server", "adam")
@dataclass
class ServerAdam(WithMoments):
    """Adam on the mean update (FedAdam of Reddi et al. 2021); as `torch.optim.Adam`, to the bit."""

    lr: Annotated[float, Gt(0), Doc("The rate.")] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of updates.")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of their squares.")] = 0.999
    eps: Annotated[float, Gt(0), Doc("Added to the root: nothing is divided by 0.")] = 1e-8

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        gradient = (-update).to(vector.dtype)
        self.steps += 1
        first = self.moment("first", vector).lerp(gradient, 1 - self.beta1)
        second = self.moment("second", vector) * self.beta2
        second.addcmul_(gradient, gradient, value=1 - self.beta2)
        self.moments = {"first": first, "second": second}
        lr = self.lr / (1 - self.beta1**self.steps)
        scale = second.sqrt().div_((1 - self.beta2**self.steps) ** 0.5).add_(self.eps)
        return vector.addcdiv(first, scale, value=-lr)

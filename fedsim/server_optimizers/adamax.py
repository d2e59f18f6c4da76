"""Adamax on the mean update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.server_optimizers.moments import WithMoments
from fedsim.settings import Doc, Ge, Gt, Lt

__all__ = ["ServerAdamax"]


@register("server", "adamax")
@dataclass
class ServerAdamax(WithMoments):
    """Adam over the largest update so far, not a mean (Kingma and Ba 2015); as torch's."""

    lr: Annotated[float, Gt(0), Doc("The rate.")] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of updates.")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("Decay of the largest so far.")] = 0.999
    eps: Annotated[float, Gt(0), Doc("Added to it: nothing is divided by 0.")] = 1e-8

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        update = update.to(vector.dtype)
        self.steps += 1
        first = self.moment("first", vector).lerp(update, 1 - self.beta1)
        decayed = self.moment("largest", vector) * self.beta2
        largest = torch.maximum(decayed, update.abs().add_(self.eps))
        self.moments = {"first": first, "largest": largest}
        return vector.addcdiv(first, largest, value=self.lr / (1 - self.beta1**self.steps))

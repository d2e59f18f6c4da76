"""NAdam on the mean update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.moments import WithMoments
from fedsim.settings import Doc, Ge, Gt, Lt

__all__ = ["ServerNAdam"]

MOMENTUM_DECAY = 0.004


@register("server", "nadam")
@dataclass
class ServerNAdam(WithMoments):
    """Adam with Nesterov's momentum (Dozat 2016); as `torch.optim.NAdam`."""

    lr: Annotated[float, Gt(0), Doc("The rate.")] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of updates.")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of their squares.")] = 0.999
    eps: Annotated[float, Gt(0), Doc("Added to the root: nothing is divided by 0.")] = 1e-8

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        update = update.to(vector.dtype)
        self.steps += 1
        first = self.moment("first", vector).lerp(update, 1 - self.beta1)
        second = self.moment("second", vector) * self.beta2
        second.addcmul_(update, update, value=1 - self.beta2)
        self.moments = {"first": first, "second": second}
        now, then = self._momentum(self.steps), self._momentum(self.steps + 1)
        product = math.prod(self._momentum(step) for step in range(1, self.steps + 1))
        root = second.div(1 - self.beta2**self.steps).sqrt_().add_(self.eps)
        moved = vector.addcdiv(update, root, value=self.lr * (1 - now) / (1 - product))
        return moved.addcdiv_(first, root, value=self.lr * then / (1 - product * then))

    def _momentum(self, step: int) -> float:
        return self.beta1 * (1 - 0.5 * math.pow(0.96, step * MOMENTUM_DECAY))

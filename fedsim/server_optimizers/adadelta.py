"""Adadelta on the mean update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.moments import WithMoments
from fedsim.settings import Doc, Ge, Gt, Lt

__all__ = ["ServerAdadelta"]


@register("server", "adadelta")
@dataclass
class ServerAdadelta(WithMoments):
    """Steps in units of earlier steps (Zeiler 2012); as `torch.optim.Adadelta`."""

    lr: Annotated[float, Gt(0), Doc("The rate.")] = 1.0
    decay: Annotated[float, Ge(0), Lt(1), Doc("Weight of the old means of squares.")] = 0.9
    eps: Annotated[float, Gt(0), Doc("Added under the roots.")] = 1e-6

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        update = update.to(vector.dtype)
        self.steps += 1
        squares = self.moment("squares", vector) * self.decay
        squares.addcmul_(update, update, value=1 - self.decay)
        moves = self.moment("moves", vector)
        move = moves.add(self.eps).sqrt_().div_(squares.add(self.eps).sqrt_()).mul_(update)
        self.moments = {
            "squares": squares,
            "moves": (moves * self.decay).addcmul_(move, move, value=1 - self.decay),
        }
        return vector.add(move, alpha=self.lr)

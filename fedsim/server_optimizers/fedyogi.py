"""FedYogi."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedsim.registry import register
from fedsim.server_optimizers.moments import WithMoments
from fedsim.settings import Doc, Ge, Gt, Lt

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FedYogi"]


@register("server", "fedyogi")
@dataclass
class FedYogi(WithMoments):
    """FedYogi (Reddi et al. 2021): second moments that forget slowly; as Flower's strategy."""

    lr: Annotated[float, Gt(0), Doc("eta, the rate.")] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of updates.")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of their squares.")] = 0.99
    tau: Annotated[float, Gt(0), Doc("Added to the root: how adaptive steps are.")] = 1e-3

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        update = update.to(vector.dtype)
        self.steps += 1
        first = self.moment("first", vector).lerp(update, 1 - self.beta1)
        second, square = self.moment("second", vector), update.square()
        second = second - (1 - self.beta2) * square * (second - square).sign()
        self.moments = {"first": first, "second": second}
        return vector.addcdiv(first, second.sqrt().add_(self.tau), value=self.lr)

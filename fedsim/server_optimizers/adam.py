"""Adam on the mean update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fedsim.registry import register
from fedsim.server_optimizers.base import ServerOptimizer
from fedsim.settings import Doc, Ge, Gt, Lt, check_settings

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ServerAdam"]


@register("server", "adam")
@dataclass
class ServerAdam(ServerOptimizer):
    """Adam on the mean update (FedAdam of Reddi et al. 2021); as `torch.optim.Adam`, to the bit."""

    lr: Annotated[float, Gt(0), Doc("The rate.")] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of updates.")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of their squares.")] = 0.999
    eps: Annotated[float, Gt(0), Doc("Added to the root: nothing is divided by 0.")] = 1e-8
    _steps: int = field(default=0, init=False, repr=False)
    _moments: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self, "server.")

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        gradient = (-update).to(vector.dtype)
        first, second = self._moments or (vector.new_zeros(len(vector)) for _ in range(2))
        self._steps += 1
        beta1, beta2 = self.beta1, self.beta2
        first = first.to(vector).lerp(gradient, 1 - beta1)
        second = (second.to(vector) * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self._moments = first, second
        lr = self.lr / (1 - beta1**self._steps)
        scale = second.sqrt().div_((1 - beta2**self._steps) ** 0.5).add_(self.eps)
        return vector.addcdiv(first, scale, value=-lr)

    def state(self) -> dict[str, Any]:
        """``steps`` and the moments ``first [d]``, ``second [d]``, once there are any."""
        if self._moments is None:
            return {}
        first, second = self._moments
        return {"steps": self._steps, "first": first.clone(), "second": second.clone()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._steps = state["steps"] if state else 0
        self._moments = (state["first"].clone(), state["second"].clone()) if state else None

"""Stochastic gradient descent along the mean update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.base import ServerOptimizer
from fedsim.settings import Doc, Ge, Gt, Lt, check_settings

__all__ = ["ServerSGD"]


@register("server", "sgd")
@dataclass
class ServerSGD(ServerOptimizer):
    """Steps along the mean update, or along its momentum; as `torch.optim.SGD` to the last bit."""

    lr: Annotated[float, Gt(0), Doc("What of the mean update is added; 1 for all of it.")] = 1.0
    momentum: Annotated[
        float, Ge(0), Lt(1), Doc("Of the heavy ball: what of its last step the next one keeps.")
    ] = 0.0
    _velocity: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self, "server.")

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        gradient = (-update).to(vector.dtype)
        if self.momentum:
            if self._velocity is None:
                self._velocity = gradient
            else:
                self._velocity = (self.momentum * self._velocity.to(vector)).add_(gradient)
            gradient = self._velocity
        return vector.add(gradient, alpha=-self.lr)

    def state(self) -> dict[str, Tensor]:
        """``velocity [d]``, once there is one."""
        return {} if self._velocity is None else {"velocity": self._velocity.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        self._velocity = state["velocity"].clone() if state else None

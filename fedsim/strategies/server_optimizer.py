"""What the server does with the noisy mean update: post-processing, free of privacy cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ServerAdam", "ServerOptimizer", "ServerSGD", "adam", "sgd"]


class ServerOptimizer(Protocol):
    """Moves the global parameters along an update.

    A class that inherits from this one has `state` and `restore` of an optimiser that keeps
    nothing between rounds.
    """

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters from ``vector [d]`` and the mean ``update [d]``; neither is changed."""

    def state(self) -> Mapping[str, Any]:
        """What it keeps between rounds: tensors and what JSON can say, by name."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        del state


@dataclass
class ServerSGD(ServerOptimizer):
    """Steps along the mean update, or along its momentum; as `torch.optim.SGD` to the last bit.

    Parameters
    ----------
    lr : float
    momentum : float
        Of the heavy ball: ``v <- momentum v - update``, ``w <- w - lr v``.
    """

    lr: float = 1.0
    momentum: float = 0.0
    _velocity: Tensor | None = field(default=None, init=False, repr=False)

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


@dataclass
class ServerAdam(ServerOptimizer):
    """Adam on the mean update (FedAdam of Reddi et al. 2021); as `torch.optim.Adam`, bit for bit.

    Parameters
    ----------
    lr : float
    betas : (float, float)
        Decay of the two moments.
    eps : float
    """

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    _steps: int = field(default=0, init=False, repr=False)
    _moments: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        gradient = (-update).to(vector.dtype)
        first, second = self._moments or (vector.new_zeros(len(vector)) for _ in range(2))
        self._steps += 1
        beta1, beta2 = self.betas
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


def sgd(lr: float = 1.0, momentum: float = 0.0) -> ServerSGD:
    """Server SGD; the default ``lr = 1`` adds the mean update as it is (FedAvg)."""
    return ServerSGD(lr, momentum)


def adam(
    lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> ServerAdam:
    """Server Adam (FedAdam of Reddi et al. 2021 on the noisy mean)."""
    return ServerAdam(lr, betas, eps)

"""SGD on the mean update, and Reddi et al.'s adaptive optimisers (2021) as in Flower."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.server_optimizers.base import StatefulOptimizer
from fedsim.settings import Doc, Ge, Gt, Lt


@register("server", "sgd")
@dataclass
class ServerSGD(StatefulOptimizer):
    """SGD on the mean update, with optional momentum; bitwise equal to `torch.optim.SGD`."""

    lr: Annotated[float, Gt(0)] = 1.0
    """The server's learning rate: the share of the mean update that is added; 1 for all of it."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Momentum (heavy ball): the share of the last step that the next one repeats."""

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        gradient = (-update).to(vector.dtype)
        if self.momentum:
            if "velocity" in self.tensors:
                gradient = (self.momentum * self.tensors["velocity"].to(vector)).add_(gradient)
            self.tensors = {"velocity": gradient}
        return vector.add(gradient, alpha=-self.lr)


@register("server", "fedavgm")
@dataclass
class FedAvgM(ServerSGD):
    """FedAvgM (Hsu et al. 2019): SGD on the mean update, with momentum."""

    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Momentum: the share of the last step that the next one repeats."""


Rate = Annotated[float, Gt(0), Doc("eta, the server's learning rate.")]
Adaptivity = Annotated[
    float, Gt(0), Doc("tau, added to the root: the smaller, the more adaptive the steps.")
]


@register("server", "fedadagrad")
@dataclass
class FedAdagrad(StatefulOptimizer):
    """FedAdagrad (Reddi et al. 2021): sums of squared updates; as Flower's strategy."""

    lr: Rate = 0.1
    tau: Adaptivity = 1e-3

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        update = update.to(vector.dtype)
        second = self.moment("second", vector).addcmul(update, update)
        self.tensors = {"second": second}
        return vector.addcdiv(update, second.sqrt().add_(self.tau), value=self.lr)


@dataclass
class FirstOverRoot(StatefulOptimizer):
    """Steps by a moving mean of the updates, divided by the root of a mean of their squares.

    A subclass defines the mean of squares, and may correct the rate.
    """

    lr: Rate = 0.1
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay rate of the moving average of updates."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Decay rate of the moving average of squares."""
    tau: Adaptivity = 1e-3

    @abstractmethod
    def squares(self, second: Tensor, update: Tensor) -> Tensor:
        """New mean of squares ``[d]``, from the previous one and an update."""

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1: ``lr``, with any bias correction."""
        return self.lr

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        update = update.to(vector.dtype)
        first = self.moment("first", vector).lerp(update, 1 - self.beta1)
        second = self.squares(self.moment("second", vector), update)
        step = int(self.tensors["step"]) + 1 if self.tensors else 1
        self.tensors = {"step": torch.tensor(step), "first": first, "second": second}
        return vector.addcdiv(first, second.sqrt().add_(self.tau), value=self.rate(step))


@register("server", "fedadam")
@dataclass
class FedAdam(FirstOverRoot):
    """FedAdam (Reddi et al. 2021) with Flower's bias correction of the first rounds."""

    def squares(self, second: Tensor, update: Tensor) -> Tensor:
        """Moving average of the squared updates."""
        return (second * self.beta2).addcmul_(update, update, value=1 - self.beta2)

    def rate(self, step: int) -> float:
        """``lr``, corrected for the bias of means that start at zero."""
        # As Flower does: it counts one step more than there have been.
        counted = step + 1
        return float(self.lr * (1 - self.beta2**counted) ** 0.5 / (1 - self.beta1**counted))


@register("server", "fedyogi")
@dataclass
class FedYogi(FirstOverRoot):
    """FedYogi (Reddi et al. 2021): second moments that decay slowly; as Flower's strategy."""

    lr: Rate = 0.01

    def squares(self, second: Tensor, update: Tensor) -> Tensor:
        """Mean of squares moved towards the new square, by a step proportional to that square."""
        square = update.square()
        return second - (1 - self.beta2) * square * (second - square).sign()

"""SGD along the mean update, and Reddi et al.'s adaptive optimisers (2021) as Flower has them."""

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
    """Steps along the mean update, or along its momentum; as `torch.optim.SGD` to the last bit."""

    lr: Annotated[float, Gt(0), Doc("What of the mean update is added; 1 for all of it.")] = 1.0
    momentum: Annotated[
        float, Ge(0), Lt(1), Doc("Of the heavy ball: what of its last step the next one keeps.")
    ] = 0.0

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
    """FedAvgM (Hsu et al. 2019): SGD along the mean update, with momentum."""

    momentum: Annotated[float, Ge(0), Lt(1), Doc("What of its last step the next one keeps.")] = 0.9


Rate = Annotated[float, Gt(0), Doc("eta, the rate.")]
Adaptivity = Annotated[float, Gt(0), Doc("Added to the root: how adaptive steps are.")]


@register("server", "fedadagrad")
@dataclass
class FedAdagrad(StatefulOptimizer):
    """FedAdagrad (Reddi et al. 2021): second moments that add up; as Flower's strategy."""

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
    """Steps along a mean of the updates, over the root of one of their squares.

    A subclass says what mean of squares that is, and may correct the rate.
    """

    lr: Rate = 0.1
    beta1: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of updates.")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("Decay of the mean of their squares.")] = 0.99
    tau: Adaptivity = 1e-3

    @abstractmethod
    def squares(self, second: Tensor, update: Tensor) -> Tensor:
        """The new mean of squares ``[d]``, from that until now and an update."""

    def rate(self, step: int) -> float:
        """Of a step: ``lr``, or what it is corrected to; steps are counted from 1."""
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
    """FedAdam (Reddi et al. 2021) with Flower's correction of its first rounds."""

    def squares(self, second: Tensor, update: Tensor) -> Tensor:
        """Their moving average."""
        return (second * self.beta2).addcmul_(update, update, value=1 - self.beta2)

    def rate(self, step: int) -> float:
        """``lr``, corrected for means that began at zero."""
        # Flower counts one round more than there have been.
        counted = step + 1
        return float(self.lr * (1 - self.beta2**counted) ** 0.5 / (1 - self.beta1**counted))


@register("server", "fedyogi")
@dataclass
class FedYogi(FirstOverRoot):
    """FedYogi (Reddi et al. 2021): second moments that forget slowly; as Flower's strategy."""

    lr: Rate = 0.01

    def squares(self, second: Tensor, update: Tensor) -> Tensor:
        """Moved towards the newest, by no more than that."""
        square = update.square()
        return second - (1 - self.beta2) * square * (second - square).sign()

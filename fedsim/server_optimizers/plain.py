"""Gradient descent along the mean update, with momentum or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.server_optimizers.base import KeptOptimizer
from fedsim.settings import Doc, Ge, Gt, Lt


@register("server", "sgd")
@dataclass
class ServerSGD(KeptOptimizer):
    """Steps along the mean update, or along its momentum; as `torch.optim.SGD` to the last bit."""

    lr: Annotated[float, Gt(0), Doc("What of the mean update is added; 1 for all of it.")] = 1.0
    momentum: Annotated[
        float, Ge(0), Lt(1), Doc("Of the heavy ball: what of its last step the next one keeps.")
    ] = 0.0

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        gradient = (-update).to(vector.dtype)
        if self.momentum:
            if "velocity" in self.kept:
                gradient = (self.momentum * self.kept["velocity"].to(vector)).add_(gradient)
            self.kept = {"velocity": gradient}
        return vector.add(gradient, alpha=-self.lr)


@register("server", "fedavgm")
@dataclass
class FedAvgM(ServerSGD):
    """FedAvgM (Hsu et al. 2019): SGD along the mean update, with momentum."""

    momentum: Annotated[float, Ge(0), Lt(1), Doc("What of its last step the next one keeps.")] = 0.9

"""What the server does with the noisy mean update: post-processing, free of privacy cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ServerOptimizer", "TorchOptimizer", "adam", "sgd"]


class ServerOptimizer(Protocol):
    """Moves the global parameters along an update."""

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters from ``vector [d]`` and the mean ``update [d]``; neither is changed."""


class TorchOptimizer:
    """A `torch.optim` optimiser whose gradient is the negative mean update.

    Parameters
    ----------
    make : callable
        From a list of parameters to a `torch.optim.Optimizer`.
    """

    def __init__(self, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
        self._make = make
        self._parameter: Tensor | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        optimizer = self._for(vector)
        assert self._parameter is not None
        with torch.no_grad():
            self._parameter.copy_(vector)
        self._parameter.grad = (-update).to(vector.dtype)
        optimizer.step()
        return self._parameter.detach().clone()

    def _for(self, vector: Tensor) -> torch.optim.Optimizer:
        if self._optimizer is None:
            self._parameter = vector.detach().clone().requires_grad_()
            self._optimizer = self._make([self._parameter])
        return self._optimizer


def sgd(lr: float = 1.0, momentum: float = 0.0) -> TorchOptimizer:
    """Server SGD; the default ``lr = 1`` adds the mean update as it is (FedAvg)."""
    return TorchOptimizer(lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum))


def adam(
    lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> TorchOptimizer:
    """Server Adam (FedAdam of Reddi et al. 2021 on the noisy mean)."""
    return TorchOptimizer(lambda params: torch.optim.Adam(params, lr=lr, betas=betas, eps=eps))

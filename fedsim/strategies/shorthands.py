"""The two usual server optimisers, by functions as short as a reader's words for them."""

from __future__ import annotations

from fedsim.server_optimizers import ServerAdam, ServerSGD

__all__ = ["adam", "sgd"]


def sgd(lr: float = 1.0, momentum: float = 0.0) -> ServerSGD:
    """Server SGD; the default ``lr = 1`` adds the mean update as it is (FedAvg)."""
    return ServerSGD(lr, momentum)


def adam(
    lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> ServerAdam:
    """Server Adam (FedAdam of Reddi et al. 2021 on the noisy mean)."""
    return ServerAdam(lr, *betas, eps)

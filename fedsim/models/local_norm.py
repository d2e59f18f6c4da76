"""Batch normalisation that stays with its client, with its running statistics (FedBN)."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.errors import FedsimError

__all__ = ["LocalBatchNorm", "localise", "statistics_of"]

STATISTICS = ("running_mean", "running_var")


class LocalBatchNorm(nn.Module):
    """As the BatchNorm that it is made of, with running statistics among its parameters.

    So a client's row holds them, a client keeps them with what else is personal, and evaluates
    with them. In training they move with each batch as PyTorch's do; no gradient has a part of
    them. A batch of one value a channel, of which there is no variance, is normalised by them.
    Source: Li et al. 2021, "FedBN".

    Parameters
    ----------
    layer : BatchNorm1d, 2d or 3d
        With running statistics of a fixed momentum.
    name : str
        For sentences.
    """

    def __init__(self, layer: _BatchNorm, name: str) -> None:
        super().__init__()
        if layer.running_mean is None or layer.running_var is None or layer.momentum is None:
            lacking = "momentum" if layer.running_mean is not None else "running statistics"
            raise FedsimError(
                f"model module '{name}' is a {type(layer).__name__} without {lacking}, so that a "
                "client would evaluate an example by what it stands beside; it must have "
                "track_running_stats=True and a momentum."
            )
        self.momentum, self.eps = layer.momentum, layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean = nn.Parameter(layer.running_mean.clone())
        self.running_var = nn.Parameter(layer.running_var.clone())

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, C, ...]`` normalised by its own statistics, or by the client's."""
        # Not detach(): that shares the count of changes, and backward would refuse the whole row.
        mean, var = self.running_mean.data, self.running_var.data
        by_batch = self.training and x.numel() > x.shape[1]
        return nn.functional.batch_norm(
            x, mean, var, self.weight, self.bias, by_batch, self.momentum, self.eps
        )


def localise(model: nn.Module, personal: Collection[str]) -> list[str]:
    """Put a `LocalBatchNorm` for each BatchNorm whose trained parameters are all personal.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    personal : collection of str
        Names of personal parameters.

    Returns
    -------
    list of str
        Names of the statistics, which are parameters now, and personal.

    Raises
    ------
    FedsimError
        If such a layer keeps no statistics.
    """
    for name, module in list(model.named_modules()):
        names = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        if name and isinstance(module, _BatchNorm) and names and {*names} <= {*personal}:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LocalBatchNorm(module, name))
    return statistics_of(model)


def statistics_of(model: nn.Module) -> list[str]:
    """Names of the parameters that are statistics, which gradients leave alone."""
    return [
        f"{name}.{statistic}" if name else statistic
        for name, module in model.named_modules()
        if isinstance(module, LocalBatchNorm)
        for statistic in STATISTICS
    ]

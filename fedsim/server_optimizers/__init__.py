"""Server optimisers, which apply the mean update to the global parameters."""

from __future__ import annotations

from fedsim.arguments import explain_calls
from fedsim.server_optimizers.adam import ServerAdam
from fedsim.server_optimizers.averaged import AveragedSGD
from fedsim.server_optimizers.base import ServerOptimizer
from fedsim.server_optimizers.published import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    ServerSGD,
)

__all__ = [
    "AveragedSGD",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "ServerAdam",
    "ServerOptimizer",
    "ServerSGD",
]

explain_calls(__name__)

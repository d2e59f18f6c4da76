"""Server optimisers, which apply the mean update to the global parameters."""

from __future__ import annotations

from fedsim.arguments import explain_calls
from fedsim.server_optimizers.averaged import AveragedSGD
from fedsim.server_optimizers.base import ServerOptimizer
from fedsim.server_optimizers.published import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    ServerSGD,
)
from fedsim.server_optimizers.torch_optim import (
    ServerAdadelta,
    ServerAdagrad,
    ServerAdam,
    ServerAdamax,
    ServerAdamW,
    ServerNAdam,
    ServerRMSProp,
)

__all__ = [
    "AveragedSGD",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "ServerAdadelta",
    "ServerAdagrad",
    "ServerAdam",
    "ServerAdamW",
    "ServerAdamax",
    "ServerNAdam",
    "ServerOptimizer",
    "ServerRMSProp",
    "ServerSGD",
]

explain_calls(__name__)

"""What the server does with the mean update."""

from __future__ import annotations

from fedsim.server_optimizers.adaptive import FedAdagrad, FedAdam, FedYogi
from fedsim.server_optimizers.base import ServerOptimizer
from fedsim.server_optimizers.plain import FedAvgM, ServerSGD
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

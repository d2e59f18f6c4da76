"""What the server does with the mean update: each optimiser is a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.lazy import names_of

if TYPE_CHECKING:
    from fedsim.server_optimizers.adadelta import ServerAdadelta
    from fedsim.server_optimizers.adagrad import ServerAdagrad
    from fedsim.server_optimizers.adam import ServerAdam
    from fedsim.server_optimizers.adamax import ServerAdamax
    from fedsim.server_optimizers.adamw import ServerAdamW
    from fedsim.server_optimizers.base import ServerOptimizer
    from fedsim.server_optimizers.fedadagrad import FedAdagrad
    from fedsim.server_optimizers.fedadam import FedAdam
    from fedsim.server_optimizers.fedavgm import FedAvgM
    from fedsim.server_optimizers.fedyogi import FedYogi
    from fedsim.server_optimizers.nadam import ServerNAdam
    from fedsim.server_optimizers.rmsprop import ServerRMSProp
    from fedsim.server_optimizers.sgd import ServerSGD

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

__getattr__ = names_of(__name__, __file__)

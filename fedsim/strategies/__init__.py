"""Strategies: DP-FedAvg, for fedsim's engines and for any Flower app."""

from fedsim.strategies.dp_fedavg import DPFedAvg, RoundReport, RunFailedError
from fedsim.strategies.server_optimizer import ServerOptimizer, TorchOptimizer, adam, sgd

__all__ = [
    "DPFedAvg",
    "RoundReport",
    "RunFailedError",
    "ServerOptimizer",
    "TorchOptimizer",
    "adam",
    "sgd",
]

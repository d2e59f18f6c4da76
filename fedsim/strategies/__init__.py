"""Strategies: DP-FedAvg, for fedsim's engines and for any Flower app."""

from fedsim.server_optimizers import ServerAdam, ServerOptimizer, ServerSGD
from fedsim.strategies.dp_fedavg import DPFedAvg
from fedsim.strategies.loop import Rounds, round_timeout, rounds_of, run_to_end
from fedsim.strategies.outcome import RoundReport, RunFailedError
from fedsim.strategies.shorthands import adam, sgd

__all__ = [
    "DPFedAvg",
    "RoundReport",
    "Rounds",
    "RunFailedError",
    "ServerAdam",
    "ServerOptimizer",
    "ServerSGD",
    "adam",
    "round_timeout",
    "rounds_of",
    "run_to_end",
    "sgd",
]

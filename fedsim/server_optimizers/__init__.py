"""What the server does with the mean update: each optimiser is a file."""

from __future__ import annotations

from fedsim.server_optimizers.adam import ServerAdam
from fedsim.server_optimizers.base import ServerOptimizer
from fedsim.server_optimizers.sgd import ServerSGD

__all__ = ["ServerAdam", "ServerOptimizer", "ServerSGD"]

"""FedAvgM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.registry import register
from fedsim.server_optimizers.sgd import ServerSGD
from fedsim.settings import Doc, Ge, Lt

__all__ = ["FedAvgM"]


@register("server", "fedavgm")
@dataclass
class FedAvgM(ServerSGD):
    """FedAvgM (Hsu et al. 2019): SGD along the mean update, with momentum."""

    momentum: Annotated[float, Ge(0), Lt(1), Doc("What of its last step the next one keeps.")] = 0.9

"""The local algorithms that the trainer runs over blocks of clients."""

from __future__ import annotations

from fedsim.clients.adadp_lr import AdadpLR
from fedsim.clients.adadp_noise import AdadpNoise
from fedsim.clients.adam import Adam
from fedsim.clients.base import LocalAlgorithm, State, Step
from fedsim.clients.ditto import Ditto
from fedsim.clients.gradients import Gradient
from fedsim.clients.proximal import Proximal
from fedsim.clients.rmsprop import RMSProp
from fedsim.clients.schedules import Schedule
from fedsim.clients.sgd import SGD

__all__ = [
    "SGD",
    "AdadpLR",
    "AdadpNoise",
    "Adam",
    "Ditto",
    "Gradient",
    "LocalAlgorithm",
    "Proximal",
    "RMSProp",
    "Schedule",
    "State",
    "Step",
]

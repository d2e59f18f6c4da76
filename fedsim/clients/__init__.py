"""Local algorithms, which the trainer runs over blocks of clients."""

from __future__ import annotations

from fedsim.arguments import explain_calls
from fedsim.clients.adadp_lr import AdadpLR
from fedsim.clients.adam import Adam
from fedsim.clients.base import (
    Gradient,
    LocalAlgorithm,
    RoundMeans,
    RunFacts,
    ServerUpdate,
    State,
    Step,
)
from fedsim.clients.ditto import Ditto
from fedsim.clients.fednova import FedNova
from fedsim.clients.fedrep import FedRep
from fedsim.clients.proximal import Proximal
from fedsim.clients.rmsprop import AdadpNoise, RMSProp
from fedsim.clients.scaffold import Scaffold
from fedsim.clients.schedules import Schedule
from fedsim.clients.sgd import SGD

__all__ = [
    "SGD",
    "AdadpLR",
    "AdadpNoise",
    "Adam",
    "Ditto",
    "FedNova",
    "FedRep",
    "Gradient",
    "LocalAlgorithm",
    "Proximal",
    "RMSProp",
    "RoundMeans",
    "RunFacts",
    "Scaffold",
    "Schedule",
    "ServerUpdate",
    "State",
    "Step",
]

explain_calls(__name__)

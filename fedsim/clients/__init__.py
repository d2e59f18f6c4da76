"""The cohort trainer and the local algorithms that it runs over blocks of clients."""

from fedsim.clients.adadp import AdadpLR
from fedsim.clients.adam import AdadpNoise, Adam, RMSProp
from fedsim.clients.data import ClientData
from fedsim.clients.dpsgd import DPSGD
from fedsim.clients.gradients import Gradient
from fedsim.clients.local import LocalAlgorithm, State, Step
from fedsim.clients.losses import accuracy, cross_entropy
from fedsim.clients.privacy import ExamplePrivacy, example_epsilon, example_events
from fedsim.clients.proximal import Proximal
from fedsim.clients.schedules import Schedule
from fedsim.clients.sgd import SGD
from fedsim.clients.trainer import Trainer

__all__ = [
    "DPSGD",
    "SGD",
    "AdadpLR",
    "AdadpNoise",
    "Adam",
    "ClientData",
    "ExamplePrivacy",
    "Gradient",
    "LocalAlgorithm",
    "Proximal",
    "RMSProp",
    "Schedule",
    "State",
    "Step",
    "Trainer",
    "accuracy",
    "cross_entropy",
    "example_epsilon",
    "example_events",
]

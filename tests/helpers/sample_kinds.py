"""A small thing of every kind, as somebody would write it: the text of its class."""

IMPORTS = """
from dataclasses import dataclass
from typing import Annotated
import numpy as np
from fedsim.clients import LocalAlgorithm
from fedsim.cohorts import InclusionSampler
from fedsim.datasets import Dataset
from fedsim.mechanisms import ScalingMechanism
from fedsim.partitions import Partition
from fedsim.server_optimizers import ServerOptimizer
from fedsim.settings import Doc, Ge, Gt
from fedsim.tasks import ExactSum, Metric
"""

CLASSES = {
    "mechanism": """
@dataclass(frozen=True)
class Bound(ScalingMechanism):
    clip_norm: Annotated[float, Gt(0), Doc("The largest norm.")] = 1.0
    power: Annotated[float, Ge(1), Doc("How sharp the corner is.")] = 4.0

    def radius(self, round_state, d):
        return self.clip_norm

    def scales(self, norms, round_state, unit):
        ratio = norms * unit / self.clip_norm
        return unit / (1 + ratio**self.power) ** (1 / self.power)
""",
    "client": """
@dataclass(frozen=True)
class Sign(LocalAlgorithm):
    lr: Annotated[float, Gt(0), Doc("The rate.")] = 0.01

    def step(self, state, gradient, at):
        state["theta"] -= self.lr * gradient.dense().sign()
""",
    "cohort": """
class Tides(InclusionSampler):
    def __init__(self, population, top: Annotated[float, Doc("The highest rate.")] = 0.9):
        super().__init__(population, highest=top)
        self.top = top

    def probabilities(self, round):
        return np.where(np.arange(self.population) % 2 == round % 2, self.top, 0.5)
""",
    "partition": """
@dataclass(frozen=True)
class ByRegion(Partition):
    clients: int = 10
    seed: int = 0
    region: Annotated[int, Ge(0), Doc("Which.")] = 0

    def deal(self, examples, generator):
        owner = (np.arange(len(examples)) + self.region) % self.clients
        return [np.flatnonzero(owner == client) for client in range(self.clients)]
""",
    "data": """
@dataclass(frozen=True)
class Blobs:
    size: Annotated[int, Ge(4), Doc("How many examples.")] = 60

    def __call__(self):
        y = np.arange(self.size) % 3
        part = {"x": np.eye(3, dtype=np.float32)[y], "y": y}
        return Dataset.from_arrays("blobs", part, part, classes=3)
""",
    "metric": """
@dataclass(frozen=True)
class Certainty(Metric):
    power: Annotated[float, Gt(0), Doc("What probabilities are raised to.")] = 1.0

    def init(self):
        return ExactSum()

    def update(self, state, outputs, targets):
        return state + ExactSum.from_values(outputs.softmax(-1).amax(-1) ** self.power)

    def merge(self, first, second):
        return first + second

    def finish(self, state):
        return state.mean
""",
    "loss": """
@dataclass(frozen=True)
class Focal:
    power: Annotated[float, Ge(0), Doc("How little counts what is well predicted.")] = 2.0

    def __call__(self, outputs, targets):
        log_p = outputs.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return -((1 - log_p.exp()) ** self.power) * log_p
""",
    "server": """
@dataclass
class Halved(ServerOptimizer):
    share: Annotated[float, Gt(0), Doc("What of the update is taken.")] = 0.5

    def step(self, vector, update):
        return vector + self.share * update.to(vector)
""",
}

"""alpha-NormEC with local steps: normalised differences from a memory, which the server adds up.

A client compares what it has learnt with a memory of its own, and sends the difference; the
mechanism normalises it, whatever its length. The client adds what it has sent to its memory, the
server to the mean of all memories, and steps along that. Nothing is lost to the normalisation: it
comes in later rounds. Source: arXiv 2502.13482; with local steps and sampled clients, 2512.21521.
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from fedsim.clients import SGD, RunFacts
from fedsim.mechanisms import Mechanism
from fedsim.server_optimizers import ServerOptimizer
from fedsim.settings import Gt


@dataclass(frozen=True)
class NormEC(SGD):
    """Sends ``(x_i - x) - v_i`` and keeps ``v_i + beta N(that)``; N is the mechanism's bound."""

    beta: Annotated[float, Gt(0)] = 0.5
    """What of a sent difference the memories take."""

    carried = ("velocity", "memory")
    requires_client_state = True

    def for_run(self, facts: RunFacts):
        return _Bounded(**vars(self), mechanism=facts.client_mechanism(self))

    def init(self, theta, numbers):
        state = super().init(theta, numbers)
        return {**state, "start": theta.clone(), "memory": torch.zeros_like(theta)}


@dataclass(frozen=True)
class _Bounded(NormEC):
    mechanism: Mechanism | None = None

    def finish(self, state):
        difference = super().finish(state) - state["start"] - state["memory"]
        sent = difference if self.mechanism is None else self.mechanism.bound(difference)
        state["memory"] = state["memory"] + self.beta * sent
        return state["start"] + difference


@dataclass
class MemoryStep(ServerOptimizer):
    """Adds the mean of a round to the mean of all memories, and steps along it.

    ``rate`` is beta times the share of the clients that a round has: of all clients' memories only
    theirs have changed.
    """

    rate: Annotated[float, Gt(0)] = 0.5
    """beta times the share of clients in a round."""
    lr: Annotated[float, Gt(0)] = 1.0
    """gamma: what of the mean memory is a step."""

    def __post_init__(self) -> None:
        self.memory = None

    def step(self, vector, update):
        change = self.rate * update.to(vector)
        self.memory = change if self.memory is None else self.memory + change
        return vector + self.lr * self.memory

    def state(self):
        return {} if self.memory is None else {"memory": self.memory}

    def restore(self, state):
        self.memory = state.get("memory")

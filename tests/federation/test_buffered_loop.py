"""Buffered rounds of many algorithms, bounds and server steps, beside a loop written here.

The loop shares nothing with fedsim but the schedule: it trains one client after another, and keeps
every version and every update until the release that has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp
from torch import Tensor, nn

from fedsim.clients import SGD, AdadpLR, Adam, LocalAlgorithm
from fedsim.clients.proximal import Proximal
from fedsim.cohorts import BufferedCohort
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.buffered.schedule import ReleaseSchedule
from fedsim.mechanisms import Clipping, Mechanism, NoPrivacy, Normalization, PerLayer
from fedsim.randomness import Randomness
from fedsim.server_optimizers.averaged import AveragedSGD
from fedsim.server_optimizers.base import ServerOptimizer
from fedsim.server_optimizers.published import FedAdam, ServerSGD
from fedsim.strategies import Availability, DPFedAvg, adam
from fedsim.training import ClientData, Trainer

SIZES = [9, 7, 9, 4, 12, 9, 8, 10, 9, 3, 9, 11]
ROUNDS, STEPS, RATE = 10, 4, 0.3
COHORT = BufferedCohort(6, 3, staleness=0.7, participations=6, rounds=ROUNDS, population=len(SIZES))
SECONDS = np.exp(np.random.default_rng(3).normal(size=len(SIZES)))

Weights = dict[str, Tensor]


def data() -> ClientData:
    return make_data(SIZES, dtype=torch.float64)


def start() -> Weights:
    return {k: v.detach().clone() for k, v in make_mlp(dtype=torch.float64).named_parameters()}


# -- a client's work, by hand ------------------------------------------------------


def gradients(weights: Weights, x: Tensor, y: Tensor) -> Weights:
    """Gradients of the mean cross-entropy of `make_mlp` over all examples of a client."""
    w = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    hidden = torch.relu(x @ w["1.weight"].T + w["1.bias"])
    logits = hidden @ w["3.weight"].T + w["3.bias"]
    loss = nn.functional.cross_entropy(logits, y)
    return dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))


@dataclass
class Descent:
    """SGD with momentum and a pull towards the global model."""

    momentum: float = 0.0
    mu: float = 0.0

    def __call__(self, client: int, weights: Weights, x: Tensor, y: Tensor) -> Weights:
        now = {name: tensor.clone() for name, tensor in weights.items()}
        velocity = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for _ in range(STEPS):
            for name, gradient in gradients(now, x, y).items():
                pulled = gradient + self.mu * (now[name] - weights[name])
                velocity[name] = self.momentum * velocity[name] + pulled
                now[name] = now[name] - RATE * velocity[name]
        return now


@dataclass
class Adaptive:
    """ADADP: a full step and two half steps, whose difference sets a rate that each client keeps.

    With a pull towards the global model, as `Descent`.
    """

    tolerance: float
    mu: float = 0.0
    rates: dict[int, float] = field(default_factory=dict)

    def __call__(self, client: int, weights: Weights, x: Tensor, y: Tensor) -> Weights:
        now, rate = weights, self.rates.get(client, RATE)

        def pulled(at: Weights) -> Weights:
            found = gradients(at, x, y)
            return {name: found[name] + self.mu * (at[name] - weights[name]) for name in at}

        for _ in range(STEPS // 2):
            first = pulled(now)
            half = {name: now[name] - rate / 2 * first[name] for name in now}
            second = pulled(half)
            full = {name: now[name] - rate * first[name] for name in now}
            difference = [
                (
                    (full[name] - half[name] + rate / 2 * second[name])
                    / full[name].abs().clamp(min=1)
                )
                for name in now
            ]
            error = math.sqrt(sum(float(part.square().sum()) for part in difference))
            if error <= self.tolerance:
                now = full
            rate *= min(max(self.tolerance / error, 0.9), 1.1)
        self.rates[client] = rate
        return now


def adam_by_hand(client: int, weights: Weights, x: Tensor, y: Tensor) -> Weights:
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    optimiser = torch.optim.Adam(parameters.values(), lr=0.02)
    for _ in range(STEPS):
        for name, gradient in gradients(parameters, x, y).items():
            parameters[name].grad = gradient
        optimiser.step()
    return {name: tensor.detach() for name, tensor in parameters.items()}


# -- bounds and server steps, by hand ----------------------------------------------


def norm(parts: list[Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in parts))


def scaled(update: Weights, layers: list[list[str]], factor: Callable[[float], float]) -> Weights:
    """Each layer of an update times a factor of its norm."""
    factors = {
        name: factor(norm([update[one] for one in layer])) for layer in layers for name in layer
    }
    return {name: factors[name] * tensor for name, tensor in update.items()}


WHOLE = [["1.weight", "1.bias", "3.weight", "3.bias"]]
LAYERS = [["1.weight", "1.bias"], ["3.weight", "3.bias"]]
BOUND = 0.05


def clipped(length: float) -> float:
    return min(1.0, BOUND / length) if length else 1.0  # ADADP may reject every step


@dataclass
class Server:
    """SGD with momentum on the mean, and the moving average of its iterates."""

    lr: float = 1.0
    momentum: float = 0.0
    decay: float = 0.0
    velocity: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0

    def __call__(self, trained: Weights, shown: Weights, mean: Weights) -> tuple[Weights, Weights]:
        """The next version that clients train from, and what is released."""
        self.count += 1
        self.velocity = {
            name: self.momentum * self.velocity.get(name, 0) + part for name, part in mean.items()
        }
        trained = {name: trained[name] + self.lr * self.velocity[name] for name in mean}
        share = max(1 - self.decay, 1 / self.count)
        return trained, {name: shown[name] + share * (trained[name] - shown[name]) for name in mean}


@dataclass
class AdamServer:
    """Adam on minus the mean, as torch has it or as Flower counts its steps."""

    lr: float
    betas: tuple[float, float]
    eps: float
    ahead: int = 0
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0

    def __call__(self, trained: Weights, shown: Weights, mean: Weights) -> tuple[Weights, Weights]:
        self.count += 1
        one, two = self.betas
        new = {}
        for name, part in mean.items():
            self.first[name] = one * self.first.get(name, 0) + (1 - one) * part
            self.second[name] = two * self.second.get(name, 0) + (1 - two) * part**2
            steps = self.count + self.ahead
            if self.ahead:
                rate = self.lr * math.sqrt(1 - two**steps) / (1 - one**steps)
                step = rate * self.first[name] / (self.second[name].sqrt() + self.eps)
            else:
                root = (self.second[name] / (1 - two**steps)).sqrt() + self.eps
                step = self.lr * self.first[name] / (1 - one**steps) / root
            new[name] = trained[name] + step
        return new, new


@dataclass(frozen=True)
class Case:
    algorithm: LocalAlgorithm
    client: Callable[[int, Weights, Tensor, Tensor], Weights]
    mechanism: Mechanism = field(default_factory=lambda: NoPrivacy("uniform"))
    bound: Callable[[Weights], Weights] = dict
    optimizer: ServerOptimizer = field(default_factory=ServerSGD)
    server: Callable[[Weights, Weights, Weights], tuple[Weights, Weights]] = field(
        default_factory=Server
    )


def cases() -> Mapping[str, Case]:
    """Each with fresh states."""
    sgd = {"algorithm": SGD(lr=RATE), "client": Descent()}
    return {
        "momentum": Case(SGD(lr=RATE, momentum=0.8), Descent(momentum=0.8)),
        "FedProx": Case(Proximal(SGD(lr=RATE), mu=0.4), Descent(mu=0.4)),
        "Adam clients": Case(Adam(lr=0.02), adam_by_hand),
        "ADADP clients": Case(AdadpLR(lr=RATE, tol=0.05), Adaptive(0.05)),
        "clipped": Case(
            **sgd, mechanism=Clipping(BOUND), bound=lambda u: scaled(u, WHOLE, clipped)
        ),
        "normalised": Case(
            **sgd,
            mechanism=Normalization(BOUND),
            bound=lambda u: scaled(u, WHOLE, lambda length: BOUND / length),
        ),
        "layers": Case(
            **sgd, mechanism=PerLayer(Clipping(BOUND)), bound=lambda u: scaled(u, LAYERS, clipped)
        ),
        "server momentum": Case(
            **sgd, optimizer=ServerSGD(0.6, 0.9), server=Server(lr=0.6, momentum=0.9)
        ),
        "server Adam": Case(
            **sgd, optimizer=adam(lr=0.05), server=AdamServer(0.05, (0.9, 0.999), 1e-8)
        ),
        "FedAdam": Case(
            **sgd, optimizer=FedAdam(lr=0.05), server=AdamServer(0.05, (0.9, 0.99), 1e-3, ahead=1)
        ),
        "average of the model": Case(
            **sgd, optimizer=AveragedSGD(0.9, 0.5, decay=0.7), server=Server(0.9, 0.5, 0.7)
        ),
        "ADADP clients, FedProx, layers, server momentum": Case(
            Proximal(AdadpLR(lr=RATE, tol=0.1), mu=0.4),
            Adaptive(0.1, mu=0.4),
            PerLayer(Clipping(BOUND)),
            lambda u: scaled(u, LAYERS, clipped),
            ServerSGD(0.6, 0.9),
            Server(lr=0.6, momentum=0.9),
        ),
    }


def in_a_loop(case: Case, schedule: ReleaseSchedule) -> Weights:
    """The released model after the last release."""
    examples = data()
    trained = shown = start()
    waiting: dict[int, list[Weights]] = {}
    rows = sorted(
        zip(
            schedule.versions.tolist(),
            schedule.client_ids.tolist(),
            schedule.releases.tolist(),
            strict=True,
        )
    )
    for version in range(ROUNDS):
        for of, client, release in rows:
            if of != version or not release:
                continue
            part = torch.from_numpy(examples.indices[client])
            after = case.client(client, trained, examples.x[part], examples.y[part])
            update = case.bound({name: after[name] - trained[name] for name in trained})
            weight = (1 + (release - 1 - version)) ** -COHORT.staleness
            waiting.setdefault(release, []).append({k: weight * u for k, u in update.items()})
        updates = waiting.pop(version + 1)
        assert len(updates) == COHORT.buffer
        mean = {name: sum(u[name] for u in updates) / COHORT.buffer for name in trained}
        trained, shown = case.server(trained, shown, mean)
    return shown


@pytest.mark.parametrize("name", cases())
def test_releases_are_those_of_a_plain_loop(name: str) -> None:
    case, schedule = cases()[name], ReleaseSchedule.of(COHORT, SECONDS, 1)
    assert (schedule.releases - 1 - schedule.versions).max() > 2
    keeps = isinstance(case.client, Adaptive)
    trainer = Trainer(
        make_mlp(dtype=torch.float64), case.algorithm, data(), batch_size=0, steps=STEPS,
        randomness=Randomness(3), state="client" if keeps else "reset",
    )  # fmt: skip
    strategy = DPFedAvg(
        mechanism=case.mechanism,
        noise_multiplier=None if isinstance(case.mechanism, NoPrivacy) else 0.0,
        cohort=COHORT,
        rounds=ROUNDS,
        seed=4,
        server_optimizer=case.optimizer,
        availability=Availability(schedule=schedule),
    )
    with LocalGrid(trainer) as grid:
        result = strategy.start(grid, array_record(start()), ROUNDS)
    expected = in_a_loop(case, schedule)
    for parameter, tensor in tensors(result.arrays).items():
        torch.testing.assert_close(tensor, expected[parameter], rtol=0, atol=1e-9)
        assert not torch.equal(tensor, start()[parameter])

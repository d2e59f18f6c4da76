"""Private training in four packages' styles, with one thing wrong in each, or nothing.

A target is named by its style and its bug; "" is the honest one. Strategies and mods are Flower's,
optimizers Opacus'. Mechanisms as pfl has them, filters as NVFlare has them and samplers are written
here: they need no package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp.strategy import FedAvg
from opacus import PrivacyEngine

from fedsim.audit import SyntheticFederation, TargetRelease
from fedsim.audit.adapters import aggregation_target
from fedsim.audit.adapters.flower import strategy_target
from fedsim.audit.adapters.opacus import loop_target
from fedsim.audit.attacks import Target

DECLARED = 20


def released(call: Callable[[SyntheticFederation], Any]) -> Target:
    return lambda f: TargetRelease.from_result(call(f), f)


def clipped(row: np.ndarray, c: float) -> np.ndarray:
    return row / max(1.0, float(np.linalg.norm(row)) / c)


def flat(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(array) for array in arrays])


class ServerSide(FedAvg):
    """Clips updates and adds noise on the server."""

    def __init__(self, f: SyntheticFederation, bug: str) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.f, self.bug = f, bug
        self.draws, self.momentum = np.random.default_rng(f.seed), np.zeros(f.rows.shape[1])

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, *rest: Any
    ) -> Iterable[Message]:
        self.names, self.model = list(arrays), flat(arrays.to_numpy_ndarrays())
        return super().configure_train(server_round, arrays, *rest)

    def noise(self, std: float) -> np.ndarray:
        return std * self.draws.standard_normal(len(self.model))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        f, c = self.f, self.f.clip_norm
        sent = [flat(reply.content["arrays"].to_numpy_ndarrays()) for reply in replies]
        updates = [row - self.model for row in sent]
        std = f.noise_multiplier * c / DECLARED
        if self.bug == "noise of the mean in each update":
            updates = [clipped(row, c) + self.noise(std) for row in updates]
            moved = sum(updates) / DECLARED
        elif self.bug == "the sum is clipped":
            moved = clipped(sum(updates), c) / DECLARED + self.noise(std)
        else:
            moved = sum(clipped(row, c) for row in updates) / DECLARED
            if self.bug == "momentum without noise":
                self.momentum = moved = 0.9 * self.momentum + moved
            moved = moved + self.noise(std)
        pieces = zip(self.names, f.arrays(self.model + moved), strict=True)
        return ArrayRecord({name: Array(piece) for name, piece in pieces}), None


class ClientMod:
    """Clips an update, and adds noise where it is local."""

    def __init__(self, f: SyntheticFederation, bug: str) -> None:
        self.f, self.bug, self.draws = f, bug, np.random.default_rng(f.seed)

    def __call__(self, message: Message, context: Context, call_next: Callable) -> Message:
        reply = call_next(message, context)
        sent = message.content["arrays"].to_numpy_ndarrays()
        moved = [
            new - old
            for new, old in zip(reply.content["arrays"].to_numpy_ndarrays(), sent, strict=True)
        ]
        counted = moved[:-1] if self.bug == "the last array is not in the norm" else moved
        scale = min(1.0, self.f.clip_norm / max(float(np.linalg.norm(flat(counted))), 1e-12))
        std = 0.0
        if self.bug.startswith("local"):
            sensitivity, epsilon = 2 * self.f.clip_norm, 0.5
            std = math.sqrt(2 * math.log(1.25e5)) * sensitivity / epsilon
            if self.bug == "local, sensitivity times epsilon":
                std = math.sqrt(2 * math.log(1.25e5)) * sensitivity * epsilon
        reply.content["arrays"] = ArrayRecord(
            [
                old + scale * move + std * self.draws.standard_normal(move.shape)
                for old, move in zip(sent, moved, strict=True)
            ]
        )
        return reply


class LastClient(FedAvg):
    """Releases what the last client sent: what a server sees that is not trusted."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        last = max(replies, key=lambda reply: reply.metadata.src_node_id)
        return last.content["arrays"], None


def flower_server(bug: str) -> Target:
    return released(strategy_target(lambda f: ServerSide(f, bug)))


def flower_mod(bug: str) -> Target:
    if bug.startswith("local"):
        last = LastClient(fraction_evaluate=0.0)
        return released(strategy_target(lambda f: last, lambda f: [ClientMod(f, bug)]))
    return released(strategy_target(lambda f: NoiseOnly(f), lambda f: [ClientMod(f, bug)]))


class NoiseOnly(ServerSide):
    """Adds noise to updates that its clients have clipped."""

    def __init__(self, f: SyntheticFederation) -> None:
        super().__init__(f, "")
        self.f = SyntheticFederation(**{**vars(f), "clip_norm": 1e9, "noise_multiplier": 1e-9})


class Steps:
    """Steps of an optimizer of Opacus that people override."""

    def __init__(self, optimizer: Any, f: SyntheticFederation) -> None:
        self.params, self.c = optimizer.params, f.clip_norm
        self.std = f.noise_multiplier * f.clip_norm

    def clip_the_batch(self) -> None:
        totals = [p.grad_sample.sum(0) for p in self.params]
        norm = torch.sqrt(sum(total.square().sum() for total in totals))
        for p, total in zip(self.params, totals, strict=True):
            p.summed_grad = total * (self.c / norm.clamp(min=1e-12)).clamp(max=1.0)

    def half_noise(self) -> None:
        for p in self.params:
            p.grad = p.summed_grad + (self.std * torch.randn(p.shape)).half().float()

    def seeded_noise(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for p in self.params:
            p.grad = p.summed_grad + self.std * torch.randn(p.shape, generator=generator)


def opacus(bug: str) -> Target:
    def make(model: Any, optimizer: Any, loader: Any, f: SyntheticFederation) -> Any:
        private = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=f.noise_multiplier,
            max_grad_norm=f.clip_norm,
        )
        optimizer, steps = private[1], Steps(private[1], f)
        if bug == "the batch's gradient is clipped":
            optimizer.clip_and_accumulate = steps.clip_the_batch
        elif bug == "noise in float16":
            optimizer.add_noise = steps.half_noise
        elif bug == "a generator with a seed of its own in each step":
            optimizer.add_noise = steps.seeded_noise
        return private

    return released(loop_target(make))


def batches(bug: str) -> Target:
    """Gradients of examples by torch.func, and a Poisson batch by hand."""

    def target(f: SyntheticFederation) -> TargetRelease:
        torch.manual_seed(f.seed)
        data = torch.tensor(f.rows)
        gradient = torch.func.vmap(torch.func.grad(lambda w, x: w @ x), in_dims=(None, 0))
        model, models, sampled = torch.zeros(data.shape[1], dtype=torch.float64), [], []
        for _ in range(f.rounds):
            ids = torch.nonzero(torch.rand(len(data)) < f.rate).ravel()
            rows = gradient(model, data[ids])
            norms = rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
            rows = rows * (f.clip_norm / norms).clamp(max=1.0)
            noise = f.noise_multiplier * f.clip_norm * torch.randn(len(model))
            size = f.rate * DECLARED
            if bug == "divides by the batch's size":
                size = max(len(ids), 1)
            model = model + (rows.sum(0) + noise) / size
            models.append(model.numpy())
            sampled.append(ids.tolist())
        return TargetRelease.from_result({"models": models, "sampled": sampled}, f)

    return target


class Mechanism:
    """As pfl has them: what is done to each user's statistics, and to the cohort's sum."""

    def __init__(self, f: SyntheticFederation, bug: str) -> None:
        self.f, self.bug, self.iteration, self.last = f, bug, 0, None
        self.bound = f.clip_norm

    def postprocess_one_user(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        if self.bug == "each parameter is clipped":
            return [clipped(array, self.f.clip_norm) for array in arrays]
        bound = self.f.clip_norm if self.bug == "users clip to the first C" else self.bound
        return self.f.arrays(clipped(flat(arrays), bound))

    def postprocess_server(self, total: list[np.ndarray], draws: Any) -> list[np.ndarray]:
        std, d = self.f.noise_multiplier * self.bound, self.f.rows.shape[1]
        noise = std * draws.standard_normal(d)
        if self.bug == "noise is divided by the cohort twice":
            noise = noise / DECLARED
        elif self.bug == "Laplace noise of the same variance":
            noise = draws.laplace(scale=std / math.sqrt(2), size=d)
        elif self.bug == "every second noise is the one before, negated":
            noise = -self.last if self.iteration % 2 else noise
            self.last = noise
        elif self.bug == "users clip to the first C":
            self.bound *= 0.8
        self.iteration += 1
        # Public: it multiplies sum and noise.
        rate = 0.7**self.iteration if self.bug == "a server's rate that falls" else 1.0
        return self.f.arrays(rate * (flat(total) + noise) / DECLARED)


def pfl(bug: str) -> Target:
    def make(f: SyntheticFederation) -> Any:
        mechanism = Mechanism(f, bug)

        def aggregate(updates: Any, draws: np.random.Generator) -> list[np.ndarray]:
            bounded = [mechanism.postprocess_one_user(update) for update in updates]
            total = [np.sum(arrays, axis=0) for arrays in zip(*bounded, strict=True)]
            return mechanism.postprocess_server(total, draws)

        return aggregate

    return released(aggregation_target(make))


class Filter:
    """As NVFlare has them: what a site sends, by name."""

    def __init__(self, f: SyntheticFederation, bug: str) -> None:
        self.f, self.bug = f, bug

    def process(self, data: dict[str, np.ndarray], draws: Any) -> dict[str, np.ndarray]:
        c, d = self.f.clip_norm, self.f.rows.shape[1]
        std = self.f.noise_multiplier * c
        bounded = dict(zip(data, self.f.arrays(clipped(flat(data.values()), c)), strict=True))
        if self.bug == "each entry is clipped":
            bounded = {name: np.clip(array, -c, c) for name, array in data.items()}
        stds = dict.fromkeys(data, std)
        if self.bug == "a layer is left out":
            stds["layer-1"] = 0.0
        elif self.bug == "noise by the size of each array":
            stds = {name: std * math.sqrt(array.size / d) for name, array in data.items()}
        return {
            name: array + stds[name] * draws.standard_normal(array.shape)
            for name, array in bounded.items()
        }


def nvflare(bug: str) -> Target:
    """What leaves the last site."""

    def make(f: SyntheticFederation) -> Any:
        applied = Filter(f, bug)

        def aggregate(updates: Any, draws: np.random.Generator) -> list[np.ndarray]:
            data = {f"layer-{index}": array for index, array in enumerate(updates[-1])}
            return list(applied.process(data, draws).values())

        return aggregate

    return released(aggregation_target(make))


def sampler(bug: str) -> Target:
    """Poisson sampling by hand."""

    def cohort(
        draws: np.random.Generator, f: SyntheticFederation, before: np.ndarray
    ) -> np.ndarray:
        drawn = draws.random(f.population) < f.rate
        if bug == "nobody twice in a row":
            drawn &= ~before
        elif bug == "at a higher rate":
            drawn = draws.random(f.population) < 1.4 * f.rate
        elif bug == "one client in every round":
            drawn[3] = True
        elif bug == "two clients together":
            drawn[5] = drawn[6]
        elif bug == "a cohort for two rounds" and before.any():
            drawn = before
        return drawn

    def target(f: SyntheticFederation) -> TargetRelease:
        draws, model = np.random.default_rng(f.seed), np.zeros(f.rows.shape[1])
        models, sampled, before = [], [], np.zeros(f.population, dtype=bool)
        for number in range(f.rounds):
            drawn = cohort(draws, f, before if number % 2 or "two" not in bug else before & False)
            before = drawn
            total = sum((clipped(row, f.clip_norm) for row in f.rows[drawn]), np.zeros(len(model)))
            noise = f.noise_multiplier * f.clip_norm * draws.standard_normal(len(model))
            model = model + (total + noise) / (f.rate * DECLARED)
            models.append(model)
            sampled.append(np.flatnonzero(drawn).tolist())
        return TargetRelease.from_result({"models": models, "sampled": sampled}, f)

    return target

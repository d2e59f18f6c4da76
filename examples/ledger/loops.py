"""A ledger beside three loops that are not fedsim's; each charges a round before it is released."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.privacy import DeclaredMechanism, Independent, Ledger, ReleasePlan
from fedsim.privacy.placement import CLIENTS


class Charged:
    """Before a Flower strategy's class: `class Mine(Charged, DifferentialPrivacy...)`."""

    ledger: Ledger
    plan: ReleasePlan

    def aggregate_train(self, server_round, replies):
        with self.ledger.release(self.plan, server_round):
            return super().aggregate_train(server_round, replies)


class ChargedNode:
    """A Flower client mod: clips and noises what leaves the node, and keeps the node's ledger."""

    def __init__(self, path: Path, clip_norm: float, multiplier: float, max_epsilon: float) -> None:
        self.ledger = Ledger(path, delta=1e-5, max_epsilon=max_epsilon)
        # What one node sends is a sum over one row, which may be any other.
        self.plan = ReleasePlan(
            level="client",
            sampler=FullCohort(1, adjacency="replace-one"),
            mechanism=DeclaredMechanism("clipping in a mod", clip_norm),
            noise=Independent(multiplier),
            placement=CLIENTS,
        )
        self.std = multiplier * clip_norm

    def __call__(self, message: Message, context: Context, call_next: Callable) -> Message:
        if not message.metadata.message_type.startswith("train"):
            return call_next(message, context)
        reply = call_next(message, context)
        ((_, sent),) = message.content.array_records.items()
        ((name, trained),) = reply.content.array_records.items()
        moved = {key: trained[key].numpy() - sent[key].numpy() for key in sent}
        norm = np.sqrt(sum(np.square(move).sum() for move in moved.values()))
        scale = min(1.0, self.plan.mechanism.clip_norm / max(norm, 1e-12))
        with self.ledger.release(self.plan, self.ledger.last_round + 1):
            draws = np.random.default_rng()  # seeded by the system
            noisy = {
                key: sent[key].numpy() + scale * move + self.std * draws.standard_normal(move.shape)
                for key, move in moved.items()
            }
        arrays = {key: Array(np.asarray(value)) for key, value in noisy.items()}
        reply.content[name] = ArrayRecord(arrays)
        return reply


def opacus_loop(path: Path, steps: int, max_epsilon: float) -> nn.Module:
    """PyTorch and Opacus: gradients of examples, Poisson sampling, a step a release."""
    torch.manual_seed(1)
    x, rate, z = torch.randn(100, 4), 0.2, 1.5
    model = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=20)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=z,
        max_grad_norm=1.0,
    )
    plan = ReleasePlan(
        level="example",
        sampler=PoissonCohort(rate, population=len(x), adjacency="zero-out"),
        mechanism=DeclaredMechanism("clipping of Opacus", clip_norm=1.0),
        noise=Independent(z),
        rounds=steps,
    )
    ledger, step = Ledger(path, delta=1e-5, max_epsilon=max_epsilon), 0
    while step < steps:
        for features, targets in loader:
            if step == steps:
                break
            step += 1
            optimizer.zero_grad()
            nn.functional.mse_loss(model(features), targets).backward()
            with ledger.release(plan, step):
                optimizer.step()
    return model

"""The config's own data and model: addresses of its random numbers, and what an example moves.

Everything else in an audit is on made-up clients. Here the run itself makes a few rounds, and every
address that it draws from is recorded; and examples of its own, good and bad, go through its
model, its loss and the path that it trains on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.audit.checks import Check, Floats, invariant
from fedsim.audit.example_runs import GradientRecorder
from fedsim.audit.noise_scale import Scale
from fedsim.config import RunConfig
from fedsim.engines import LocalGrid
from fedsim.randomness import Address, Randomness
from fedsim.runs import factories
from fedsim.runs.resolve import Resolved, resolve
from fedsim.runs.runner import drive
from fedsim.training import ClientData, Trainer

ROUNDS = 2
STEPS = 2
MOST = 8
"""Examples beside the canary."""
FAINT = 1e-3
"""A noise multiplier so small that rounding of noise does not matter."""
SLACK = 1e-2


@contextmanager
def watched() -> Iterator[list[Address]]:
    """Every address that is asked for within, in order, but those repeated on purpose."""
    addresses: list[Address] = []
    before = Randomness.watch
    Randomness.watch = addresses.append
    try:
        yield addresses
    finally:
        Randomness.watch = before


def address_check(config: RunConfig) -> Check:
    """The run's first rounds, here and without writing anything: no number is used twice."""
    changes: dict[str, str | int] = {
        "rounds": min(ROUNDS, config.rounds),
        "client.state-dir": "",
        "client.noise.max-epsilon": "",
        "engine.name": "local",
        "evaluate.every": 0,
        "noise.entropy": "config",
        "noise.max-epsilon": "",
    }
    changes |= {"client.steps": STEPS} if config.client.steps else {"client.epochs": 1}
    short = config.replace(**changes)
    with watched() as addresses:
        resolved = resolve(short)
        drive(resolved, LocalGrid(resolved.trainer))
    twice = [address for address, times in Counter(addresses).items() if times > 1]
    broken = None
    if twice:
        first = twice[0]
        broken = (
            f"{len(twice)} twice, the first of {first.purpose.name.lower()} at {first.level} "
            f"level in round {first.round}"
        )
    looked = f"{len(addresses):,} addresses of {short.rounds} rounds"
    return invariant("noise", "addresses of draws", looked, broken, "each asked for once")


def input_check(resolved: Resolved) -> Check:
    """What one example moves, through the config's own model, with and without it."""
    data = resolved.trainer.data
    largest = max(data.indices, key=len)[: MOST + 1]
    x, y = data.x[largest], data.y[largest]
    without = _sum(resolved, x[:-1], y[:-1])
    longest, name, broken = 0.0, "none", None
    for what, (features, target) in _canaries(x[-1], y[-1], data.y).items():
        moved = _sum(
            resolved, torch.cat([x[:-1], features[None]]), torch.cat([y[:-1], target[None]])
        )
        length = float(np.linalg.norm(moved - without))
        if not np.isfinite(length):
            broken = f"a gradient that is not finite, with an example that {what}"
        elif length > longest:
            longest, name = length, what
    # In units of the bounds: one for each bound that a row has.
    assert resolved.example_privacy is not None
    allowed = math.sqrt(len(resolved.example_privacy.mechanism.cover(resolved.trainer.layout)))
    if longest > allowed * (1 + SLACK):
        broken = f"{longest:.4g} bounds, with an example that {name}"
    return invariant(
        "bound", "what one example moves in the model itself",
        f"{len(largest) - 1} examples of one client, with and without another", broken,
        f"{allowed:.4g} bounds at most",
    )  # fmt: skip


def _canaries(x: Tensor, y: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Features and target of examples, by what is special about each."""
    canaries = {"is one of the client's": (x, y)}
    others = targets[(targets != y).reshape(len(targets), -1).any(1)]
    if len(others):
        canaries["is mislabelled"] = (x, others[0])
    if x.is_floating_point():
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
        canaries |= {
            "is noise": (noise, y),
            "is a hundred times as large": (100 * x, y),
            "is huge": (torch.full_like(x, 1e15), y),
            "is NaN": (torch.full_like(x, torch.nan), y),
        }
    return canaries


def _sum(resolved: Resolved, x: Tensor, y: Tensor) -> Floats:
    """The first noisy sum of a client that has these examples, in units of the bounds, ``[d]``.

    All are in the batch, and the noise is the same for any examples: it cancels in a difference.
    """
    privacy = resolved.example_privacy
    assert privacy is not None
    recorder = GradientRecorder()
    source = resolved.trainer.data
    trainer = Trainer(
        resolved.trainer.model,
        recorder,
        ClientData(x, y, [np.arange(len(y))], source.mean, source.std),
        batch_size=0,
        steps=1,
        loss=factories.loss(resolved.config),
        metrics={},
        path=resolved.config.client.path,
        kernel=resolved.config.client.kernel,
        randomness=Randomness(1, "audit"),
        device=resolved.trainer.device,
        privacy=replace(privacy, noise_multiplier=FAINT, ledger_dir=None, max_epsilon=None),
    )
    for _ in trainer.train(trainer.initial(), np.zeros(1, dtype=np.int64), 1):
        pass
    ((_, _, gradient),) = recorder.seen
    mean = trainer.packing.unpack(gradient)[0].double().cpu().numpy()
    scale = Scale.of(privacy.mechanism, privacy.mechanism.init(trainer.layout), trainer.layout)
    return np.asarray((mean - scale.center) * len(y) / scale.half)

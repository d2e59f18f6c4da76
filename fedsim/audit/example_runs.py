"""Local training as it is, on made-up examples, and every gradient that it released.

The model is linear and so is the loss: the gradient of an example is the example itself, so that
an audit can choose the worst rows. Everything else is what a run uses: the trainer, its batches,
its bounds, its noise, its clients' ledgers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.audit.checks import Floats
from fedsim.audit.noise_scale import Scale
from fedsim.audit.observation import columns
from fedsim.audit.worlds import LENGTH
from fedsim.clients import LocalAlgorithm
from fedsim.clients.base import Gradient, State, Step
from fedsim.errors import BudgetSpentError
from fedsim.mechanisms import Mechanism
from fedsim.privacy import Entry, Event
from fedsim.privacy.plan import LocalWork, ReleasePlan
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.block import Block
from fedsim.training import ClientData, ExamplePrivacy, Trainer

D = 512
"""Parameters of the model, where nothing else decides their number."""


@dataclass(frozen=True)
class GradientRecorder(LocalAlgorithm):
    """Notes every gradient that it is given, and leaves the parameters unchanged."""

    seen: list[tuple[int, int, Tensor]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def step(self, state: State, gradient: Gradient, step: Step) -> None:
        """Note the round, the step and the gradient."""
        self.seen.append((step.round, step.index, gradient.dense().clone()))


class _Layers(nn.Module):
    """Sum of linear layers, each of some inputs."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.layers = nn.ModuleList(_linear(size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Sum of the layers' outputs, ``[B, 1]``."""
        parts = zip(self.layers, torch.split(x, self.sizes, -1), strict=True)
        return torch.stack([layer(part) for layer, part in parts]).sum(0)


def _linear(size: int) -> nn.Module:
    return nn.Linear(size, 1, bias=False, dtype=torch.float64)


def first_output(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient is the input."""
    del targets
    return outputs[:, 0]


@dataclass(frozen=True)
class ExamplePlan:
    """What is audited at example level: clients of one size, their work, and their privacy.

    Attributes
    ----------
    privacy : ExamplePrivacy
    work : LocalWork
    size : int
        Examples of each client.
    d : int
        Parameters of the model.
    """

    privacy: ExamplePrivacy
    work: LocalWork
    size: int
    d: int = D

    @classmethod
    def smaller(cls, privacy: ExamplePrivacy, work: LocalWork, size: int, most: int) -> ExamplePlan:
        """The same rate and number of steps with at most ``most`` examples."""
        # Clients' own files are not the audit's.
        privacy = replace(privacy, ledger_dir=None)
        if size <= most:
            return cls(privacy, work, size)
        batch = max(1, round(work.batch_of(size) * most / size))
        epochs = None if work.steps else work.epochs
        return cls(privacy, LocalWork(batch, epochs, work.steps), most)

    def with_noise(self, multiplier: float) -> ExamplePlan:
        """The same at another noise multiplier."""
        return replace(self, privacy=replace(self.privacy, noise_multiplier=multiplier))

    @cached_property
    def release_plan(self) -> ReleasePlan[Mechanism]:
        """What each client releases."""
        plan = self.privacy.plan(self.work, self.size)
        assert plan is not None
        return plan

    @property
    def event(self) -> Event:
        """What a round costs a client."""
        return self.release_plan.event()

    @property
    def steps(self) -> int:
        """Gradients that a client releases in a round."""
        return self.work.steps_of(self.size)

    @property
    def denominator(self) -> float:
        """Of a mean gradient."""
        return self.release_plan.denominator

    @cached_property
    def model(self) -> nn.Module:
        """One weight an input: in several layers where the bound distinguishes them."""
        layered = len(self.privacy.mechanism.cover(_layout(_Layers([2, 2])))) > 1
        quarter = self.d // 4
        return (
            _Layers([quarter, quarter, self.d - 2 * quarter])
            if layered
            else nn.Sequential(_linear(self.d))
        )

    @property
    def columns(self) -> list[slice]:
        """Columns of the model's layers."""
        return columns(weights.numel() for weights in self.model.parameters())

    @cached_property
    def scale(self) -> Scale:
        """Units of the first gradient's noise."""
        layout, mechanism = _layout(self.model), self.privacy.mechanism
        return Scale.of(mechanism, mechanism.init(layout), layout)

    @property
    def longest(self) -> float:
        """Length of a coordinate that every bound shortens."""
        return LENGTH * float(self.scale.half.max())

    @property
    def adapts(self) -> bool:
        """Whether later steps depend on earlier ones, in ways that only the client knows."""
        return bool(self.privacy.mechanism.init(_layout(self.model)))

    def rounds_of(self, releases: int) -> int:
        """Rounds that have so many releases whose bound is known."""
        return max(1, -(-releases // (1 if self.adapts else self.steps)))


def _layout(model: nn.Module) -> Layout:
    return Layout.of(dict(model.named_parameters()))


@dataclass(frozen=True)
class ExampleRun:
    """What clients' local training released.

    Attributes
    ----------
    releases : float64 ``[clients, rounds, steps, d]``
        Noisy mean gradients.
    known : float64 ``[clients, releases, d]``
        Those whose bound is known.
    entries : sequence of tuple of Entry
        Each client's ledger.
    reports : sequence of mapping of name to float64 ``[clients]``
        What clients report after each round beside their updates, and whether they failed.
    """

    releases: Floats
    known: Floats
    entries: Sequence[tuple[Entry, ...]]
    reports: Sequence[Mapping[str, Floats]]


def observe_examples(
    plan: ExamplePlan, examples: Tensor, rounds: int, seed: int | None
) -> ExampleRun:
    """Train every client in every round, as one block after another.

    Parameters
    ----------
    examples : Tensor ``[clients, size, d]``
        Rows of each client's examples.
    """
    clients, size, d = examples.shape
    data = ClientData(
        examples.reshape(clients * size, d),
        torch.zeros(clients * size, dtype=torch.int64),
        list(np.arange(clients * size).reshape(clients, size)),
    )
    recorder = GradientRecorder()
    work: dict[str, Any] = {"epochs": None if plan.work.steps else plan.work.epochs}
    trainer = Trainer(
        plan.model,
        recorder,
        data,
        batch_size=plan.work.batch_size,
        steps=plan.work.steps,
        loss=first_output,
        metrics={},
        randomness=Randomness(seed),
        privacy=plan.privacy,
        **work,
    )
    releases = np.zeros((clients, rounds, plan.steps, d))
    vector = trainer.initial()
    reports: list[dict[str, Floats]] = []
    for number in range(1, rounds + 1):
        recorder.seen.clear()
        blocks: list[Block] = []
        with suppress(BudgetSpentError):  # then nothing is released
            blocks += trainer.train(vector, np.arange(clients), number)
        reports.append(_reports_of(blocks))
        steps: dict[int, list[Tensor]] = {}
        for _, index, rows in recorder.seen:
            steps.setdefault(index, []).append(trainer.packing.unpack(rows))
        for index, parts in steps.items():
            releases[:, number - 1, index] = torch.cat(parts).numpy()
    ledgers = trainer.ledgers
    assert ledgers is not None
    entries = [ledgers.of(client).entries for client in range(clients)]
    known = releases[:, :, :1] if plan.adapts else releases
    return ExampleRun(releases, known.reshape(clients, -1, d), entries, reports)


def _reports_of(blocks: Sequence[Block]) -> dict[str, Floats]:
    if not blocks:
        return {}
    named = {name: [block.metrics[name] for block in blocks] for name in blocks[0].metrics}
    named["failed"] = [(~block.ok).astype(np.float64) for block in blocks]
    return {name: np.concatenate(parts) for name, parts in named.items()}

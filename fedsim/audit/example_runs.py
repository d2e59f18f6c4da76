"""Local training as it is, on made-up examples, and every gradient that it released.

The model is linear and so is the loss: the gradient of an example is the example itself, and
an audit can put there whatever row is worst. Everything else is the real thing: the trainer,
its batches, its bounds, its noise, its clients' ledgers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

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

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GradientRecorder(LocalAlgorithm):
    """Keeps every gradient that it is given, and stays where it is."""

    seen: list[tuple[int, int, Tensor]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def step(self, state: State, gradient: Gradient, step: Step) -> None:
        """See `LocalAlgorithm`."""
        self.seen.append((step.round, step.index, gradient.dense().clone()))


def linear(sizes: Sequence[int]) -> nn.Module:
    """One weight an input, in one layer or in several."""
    if len(sizes) == 1:
        return nn.Sequential(nn.Linear(sizes[0], 1, bias=False, dtype=torch.float64))
    return _Layers(sizes)


class _Layers(nn.Module):
    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.layers = nn.ModuleList(
            nn.Linear(size, 1, bias=False, dtype=torch.float64) for size in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        """Sum of the layers' outputs, ``[B, 1]``."""
        parts = zip(self.layers, torch.split(x, self.sizes, -1), strict=True)
        return torch.stack([layer(columns) for layer, columns in parts]).sum(0)


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
    layered : bool
        Whether the model has several layers.
    """

    privacy: ExamplePrivacy
    work: LocalWork
    size: int
    layered: bool = False

    @classmethod
    def smaller(cls, privacy: ExamplePrivacy, work: LocalWork, size: int, most: int) -> ExamplePlan:
        """The same rate and number of steps with at most ``most`` examples."""
        layered = len(privacy.mechanism.cover(_layout([2, 2]))) > 1
        # Clients' own files are not an audit's business.
        privacy = replace(privacy, ledger_dir=None)
        if size <= most:
            return cls(privacy, work, size, layered)
        batch = max(1, round(work.batch_of(size) * most / size))
        epochs = None if work.steps else work.epochs
        return cls(privacy, LocalWork(batch, epochs, work.steps), most, layered)

    @property
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

    def sizes(self, d: int) -> list[int]:
        """Sizes of the layers of a model of ``d`` parameters."""
        return [d // 4, d // 4, d - 2 * (d // 4)] if self.layered else [d]

    def layout(self, d: int) -> Layout:
        """Of that model."""
        return _layout(self.sizes(d))

    def columns(self, d: int) -> list[slice]:
        """Columns of its layers."""
        stops = np.cumsum(self.sizes(d)).tolist()
        return [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]


def _layout(sizes: Sequence[int]) -> Layout:
    return Layout.of(dict(linear(sizes).named_parameters()))


@dataclass(frozen=True)
class ExampleRun:
    """What clients' local training released.

    Attributes
    ----------
    releases : float64 ``[clients, rounds, steps, d]``
        Noisy mean gradients.
    entries : sequence of tuple of Entry
        Each client's ledger.
    reports : sequence of mapping of name to float64 ``[clients]``
        What clients report after each round beside their updates, and whether they failed.
    """

    releases: Floats
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
        linear(plan.sizes(d)),
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
        reports.append(_reports(blocks))
        steps: dict[int, list[Tensor]] = {}
        for _, index, rows in recorder.seen:
            steps.setdefault(index, []).append(trainer.packing.unpack(rows))
        for index, parts in steps.items():
            releases[:, number - 1, index] = torch.cat(parts).numpy()
    ledgers = trainer.ledgers
    assert ledgers is not None
    entries = [ledgers.of(client).entries for client in range(clients)]
    return ExampleRun(releases, entries, reports)


def _reports(blocks: Sequence[Block]) -> dict[str, Floats]:
    if not blocks:
        return {}
    named = {name: [block.metrics[name] for block in blocks] for name in blocks[0].metrics}
    named["failed"] = [(~block.ok).astype(np.float64) for block in blocks]
    return {name: np.concatenate(parts) for name, parts in named.items()}

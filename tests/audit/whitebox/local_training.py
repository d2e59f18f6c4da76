"""Audit of local training: the real trainer on synthetic examples, with all released gradients.

Model and loss are linear, so that the gradient of an example is the example itself, and an audit
can choose the worst rows. Everything else is what a run uses: trainer, batches, bounds, noise and
clients' ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from whitebox import catalogue
from whitebox.bound_checks import Scale
from whitebox.clients import ALONE, SyntheticClients, clipped_scale
from whitebox.evidence import FEW_PARAMETERS, Evidence
from whitebox.ledger_checks import AFFORDABLE_ROUNDS, budget_between
from whitebox.neighbouring_runs import Neighbours
from whitebox.plan_checks import ExampleRun
from whitebox.target import Observation, Target, parameters

from fedsim.array_types import Floats, Ints
from fedsim.audit.claim import Claim
from fedsim.audit.findings import Finding, SampleChecks
from fedsim.audit.sampling_checks import Sampled
from fedsim.audit.two_world import distinguish
from fedsim.audit.user_checks import GradientRecorder
from fedsim.errors import BudgetSpentError
from fedsim.mechanisms import Mechanism
from fedsim.privacy.local_work import LocalWork
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.block import Block
from fedsim.training import ClientData, ExamplePrivacy, Trainer

CLIENTS, RELEASES, WORLD_RELEASES, RISK = 2, 100, 12, 1e-3
D = 512
"""Default number of the model's parameters."""
SEEDS_TRIED = 10
"""Number of seeds tried for a batch with the canary: one seed has none in up to 2 % of audits."""


class LinearLayers(nn.Module):
    """Sum of linear layers, each of its own part of the inputs."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.layers = nn.ModuleList(linear_layer(size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Sum of the layers' outputs, ``[B, 1]``."""
        parts = zip(self.layers, torch.split(x, self.sizes, -1), strict=True)
        return torch.stack([layer(part) for layer, part in parts]).sum(0)


def linear_layer(size: int) -> nn.Module:
    """A linear layer with one output."""
    return nn.Linear(size, 1, bias=False, dtype=torch.float64)


def first_output(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is the output, so that the gradient of an example is the example."""
    del targets
    return outputs[:, 0]


@dataclass(frozen=True)
class TrainerTarget(Target):
    """A client's local training as a target: rows are per-example gradients, steps are releases.

    Attributes
    ----------
    privacy : ExamplePrivacy
    work : LocalWork
    size : int
        Number of the client's examples.
    """

    row: ClassVar[str] = "example"

    privacy: ExamplePrivacy
    work: LocalWork
    size: int

    @classmethod
    def smaller(
        cls, privacy: ExamplePrivacy, work: LocalWork, size: int, most: int
    ) -> TrainerTarget:
        """Make a target with the same rate and steps, and at most ``most`` examples."""
        privacy = replace(privacy, rounds=None, may_stop=False)  # each round is charged by itself
        if size > most:
            batch = max(1, round(work.batch_of(size) * most / size))
            epochs = None if work.steps else work.epochs
            size, work = most, LocalWork(batch, epochs, work.steps)
        return cls(privacy, work, size, start=parameters(D))

    @cached_property
    def plan(self) -> ReleasePlan[Mechanism]:
        """The client's release plan."""
        plan = self.privacy.plan(self.work, self.size)
        assert plan is not None
        return plan

    @property
    def delta(self) -> float:
        """The client's delta."""
        return self.privacy.delta

    @property
    def steps(self) -> int:
        """Number of gradients that a client releases in a round."""
        return self.work.steps_of(self.size)

    def with_releases(self, releases: int) -> TrainerTarget:
        """The same target with enough rounds for this number of releases of known bound."""
        return self.with_rounds(max(1, -(-releases // (1 if self.adapts else self.steps))))

    @cached_property
    def model(self) -> nn.Module:
        """Linear model with one weight for each input, in layers if the bound is per layer."""
        layered = len(self.mechanism.segments(Layout.of(parameters(D)))) > 1
        sizes = [columns.stop - columns.start for columns in self.columns]
        return LinearLayers(sizes) if layered else nn.Sequential(linear_layer(self.layout.d))

    def observe(self, clients: SyntheticClients, seed: int | None) -> Observation:
        """Train one client whose examples are the rows of the synthetic clients."""
        blocks = clients.train(torch.zeros(0), np.arange(self.size), 1)
        rows = torch.cat([block.rows.double() for block in blocks if block.rows is not None])
        run = self.train(rows[None], seed)
        # An adaptive bound is known to an observer in a round's first step only.
        known = run.releases[0, :, :1] if self.adapts else run.releases[0]
        moves = known.reshape(-1, self.layout.d)
        return Observation(
            moves=moves,
            statistics=[{}] * len(moves),
            sampled=[np.empty(0, dtype=np.int64)] * len(moves),
            entries=run.entries[0],
            charged=(),
            states=[self.mechanism.init(self.layout)],
            clip_norms=(),
            ended="",
            error=None,
            delta=self.delta,
            outputs=() if self.privacy.unprotected_metrics else run.reports,
        )

    def train(self, examples: Tensor, seed: int | None) -> ExampleRun:
        """Train all clients in all rounds.

        Parameters
        ----------
        examples : Tensor ``[clients, size, d]``
            Rows of each client's examples.
        """
        clients, size, d = examples.shape
        parts = list(np.arange(clients * size).reshape(clients, size))
        targets = torch.zeros(clients * size, dtype=torch.int64)
        recorder = GradientRecorder()
        trainer = Trainer(
            self.model,
            recorder,
            ClientData(examples.reshape(clients * size, d), targets, parts),
            batch_size=self.work.batch_size,
            epochs=None if self.work.steps else self.work.epochs,
            steps=self.work.steps,
            loss=first_output,
            metrics={},
            randomness=Randomness(seed),
            privacy=self.privacy,
        )
        releases = np.zeros((clients, self.rounds, self.steps, d))
        vector = trainer.initial()
        reports: list[dict[str, Floats]] = []
        for number in range(1, self.rounds + 1):
            recorder.gradients.clear()
            blocks: list[Block] = []
            with suppress(BudgetSpentError):  # the client releases nothing in this round
                blocks += trainer.train(vector, np.arange(clients), number)
            reports.append(_reports_of(blocks))
            steps: dict[int, list[Tensor]] = {}
            for _, index, rows in recorder.gradients:
                steps.setdefault(index, []).append(trainer.packing.unpack(rows))
            for index, packed in steps.items():
                releases[:, number - 1, index] = torch.cat(packed).numpy()
        ledger = trainer.ledger
        assert ledger is not None
        entries = [
            tuple(entry for entry in ledger.entries if client in entry.owners)
            for client in range(clients)
        ]
        return ExampleRun(releases, entries, reports)


def _reports_of(blocks: Sequence[Block]) -> dict[str, Floats]:
    if not blocks:
        return {}
    named = {name: [block.metrics[name] for block in blocks] for name in blocks[0].metrics}
    named["failed"] = [(~block.ok).astype(np.float64) for block in blocks]
    return {name: np.concatenate(parts) for name, parts in named.items()}


@dataclass(frozen=True, eq=False)
class ExampleEvidence(Evidence):
    """Runs of a client's local training.

    Parameters
    ----------
    rounds : int
        Rounds of the audited run.
    clients_per_world : int
        Number of clients without, and of clients with the canary, in the two worlds.
    """

    target: TrainerTarget
    rounds: int = 1
    clients_per_world: int = 20

    @classmethod
    def of(cls, target: TrainerTarget, rounds: int, worlds: int, seed: int) -> ExampleEvidence:
        """Make it with enough rounds to test the noise."""
        enough = target.with_releases(RELEASES)
        return cls(enough, seed, rounds=rounds, clients_per_world=worlds)

    def checks(self) -> Iterator[SampleChecks]:
        """Samples and checks for any target, and for ledgers, batches and two worlds."""
        yield from super().checks()
        yield lambda: self.lines, catalogue.CLIENTS_RUN
        yield lambda: (self.claim, self.seed), catalogue.CLAIM
        yield lambda: self.budget, catalogue.BUDGET
        yield lambda: self.worlds, catalogue.TWO_WORLDS
        if self.present:
            yield lambda: self.sampled, catalogue.DRAWS
            yield lambda: self.passes, catalogue.PASSES
        if not self.in_layers:
            return
        moved = catalogue.moved_by("example")
        if self._canary_batch is None:
            examined = f"the batches of each of {SEEDS_TRIED} seeds"
            why = "the canary, which is the last example, is in no batch"
            yield catalogue.omitted_checks((*catalogue.REPORTS, *moved), examined, why)
        else:
            yield lambda: self.neighbours, catalogue.REPORTS
            yield lambda: self.neighbours.moved, moved

    @property
    def claim(self) -> Claim:
        """Claim of all rounds together."""
        return Claim((self.target.event.times(self.rounds),), self.target.delta)

    @cached_property
    def silent_release_is_noise(self) -> bool:
        """Whether zero rows add nothing; otherwise unknown batch sizes would matter."""
        target = self.target
        scale = Scale.from_mechanism(
            target.mechanism, target.mechanism.init(target.layout), target.layout
        )
        return not scale.zero.any()

    @property
    def lines(self) -> tuple[TrainerTarget, ExampleRun]:
        """A run of several clients without rows."""
        target = self.target.with_model(parameters(FEW_PARAMETERS))
        return target, target.train(self._zeros(target), self.seed)

    def _zeros(self, target: TrainerTarget) -> Tensor:
        return torch.zeros(CLIENTS, target.size, target.layout.d, dtype=torch.float64)

    @cached_property
    def _batches(self) -> list[list[Ints]] | None:
        """Batches of each run: the examples that moved each release."""
        if self.target.adapts and not self.silent_release_is_noise:
            return None
        draws = []
        for quiet, loud in zip(self.runs, self.moving, strict=True):
            distances = [self._distance(quiet, loud, index) for index in range(len(loud.moves))]
            # In units of the bounds, an example in the batch moves it by one, others by nothing.
            draws.append([np.flatnonzero(far * self.measured.stds > 0.5) for far in distances])
        return draws

    @cached_property
    def sampled(self) -> Sampled | None:
        """Batches as samples, if the law has inclusion probabilities; else None."""
        size, event = self.target.size, self.target.event
        if self._batches is None or event.law.inclusion(size) is None:
            return None
        return Sampled.from_cohorts(self._batches, event, size, "examples")

    @property
    def passes(self) -> tuple[TrainerTarget, int, Sequence[Sequence[Ints]]] | None:
        """Batches of shuffled passes, and their number in a pass; None for other sampling."""
        if self._batches is None or self.sampled is not None:
            return None
        size, work = self.target.size, self.target.work
        return self.target, -(-size // work.batch_of(size)), self._batches

    @property
    def budget(self) -> tuple[Mapping[str, int], str] | None:
        """Rounds that clients with a budget release."""
        budget = budget_between(self.target.event, self.target.delta)
        if not budget:  # at a large delta a few rounds cost no epsilon
            return None
        privacy = replace(self.target.privacy, max_epsilon=budget)
        limited = replace(self.target, privacy=privacy, rounds=AFFORDABLE_ROUNDS + 3)
        limited = limited.with_model(parameters(FEW_PARAMETERS))
        releases = limited.train(self._zeros(limited), self.seed).releases
        released = (releases != 0).any((2, 3)).sum(1).tolist()
        by_client = {f"client {client}": number for client, number in enumerate(released)}
        return by_client, f"{limited.rounds} rounds at a budget of epsilon {budget:.4g}"

    @cached_property
    def _canary_batch(self) -> tuple[TrainerTarget, int] | None:
        """Target and seed with which the canary, the last example, is in a batch; or None."""
        # Long enough for the canary to be in several batches.
        releases = -(-4 * self.target.size // int(self.target.plan.denominator))
        target = self.target.with_releases(releases)
        clients = target.silent_clients(), target.world(ALONE)
        for seed in range(self.seed, self.seed + SEEDS_TRIED):
            quiet, loud = (target.observe(side, seed).moves for side in clients)
            if not np.array_equal(quiet, loud):
                return target, seed
        return None

    @cached_property
    def neighbours(self) -> Neighbours:
        """Runs with and without one example, which has the worst rows, all else equal."""
        assert self._canary_batch is not None
        neighbours = Neighbours(*self._canary_batch)
        neighbours.try_behaviours(self.measured, {})
        return neighbours

    @property
    def worlds(self) -> Finding:
        """Attack in two worlds, in which each client is a run; half of them have the canary."""
        runs, steps = self.clients_per_world, self.target.steps
        rounds = max(1, min(self.rounds, WORLD_RELEASES // steps))
        target = self.target.with_model(parameters(FEW_PARAMETERS)).with_rounds(rounds)
        rows = torch.zeros(2 * runs, target.size, target.layout.d, dtype=torch.float64)
        rows[runs:, 0] = clipped_scale(target.mechanism, target.layout)
        moves = target.train(rows, self.seed).releases.reshape(2 * runs, -1, target.layout.d)
        claim = Claim((target.event.times(rounds),), target.delta)
        examined = (
            f"{runs} clients without and {runs} with a canary, {rounds} rounds, "
            f"epsilon {claim.epsilon:.3g}"
        )
        direction = np.ones(target.layout.d)
        attacked = distinguish("", moves[:runs], moves[runs:], direction, claim, RISK)
        return replace(attacked.finding, examined=examined)

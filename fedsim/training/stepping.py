"""What clients step on: gradients as they are, or releases of their examples' gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from fedsim.randomness import Randomness
from fedsim.training.alone_steps import AloneSteps, LayerSteps
from fedsim.training.batches import Batches, Ints, plan_batches, width
from fedsim.training.block_steps import BlockSteps
from fedsim.training.entering import Entering
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.hidden_draws import Seeds
from fedsim.training.local_step import LocalStep
from fedsim.training.paths.alone import AlonePath
from fedsim.training.paths.choice import Path
from fedsim.training.paths.examples import Way
from fedsim.training.paths.layered import LayeredPath
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.stacked import StackedPath
from fedsim.training.steps import Bench, PrivateSteps, Steps
from fedsim.training.workload import Workload

__all__ = ["OpenStepping", "ReleasedStepping", "Stepping"]

# Beyond so many clients nothing is gained by drawing at once; of examples of steps it is a MiB.
MOST_AHEAD, PLACES_AHEAD = 64, 2**16


class Stepping(Protocol):
    """How a trainer's clients draw their batches, and make their steps."""

    @property
    def reports_loss(self) -> bool:
        """Whether clients say what their training loss was."""

    def ahead(self, client_ids: Ints, size: int) -> int:
        """How many of these clients, in blocks of ``size``, draw their batches before they begin.

        The first ones, in whole blocks; none where each block draws when it begins.
        """

    def batches(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> Iterator[Batches]:
        """Draw these clients' batches, those of one width together."""

    def steps(self, batches: Batches, entering: Entering) -> Steps:
        """The steps of the clients whose batches these are, ready to be run."""


@dataclass(frozen=True)
class OpenStepping:
    """Without privacy for examples.

    Parameters
    ----------
    bench : Bench
    workload : Workload
    path : Path
    draws : bool
        Whether the model draws in training.
    """

    bench: Bench
    workload: Workload
    path: Path
    draws: bool
    reports_loss = True

    def ahead(self, client_ids: Ints, size: int) -> int:
        """See `Stepping`; no more than there is room for."""
        if size >= MOST_AHEAD:
            return 0
        client_ids = client_ids[: MOST_AHEAD // size * size]
        sizes = [self.bench.data.size(i) for i in client_ids.tolist()]
        widest = max(width(self.workload.work.batch_size, size) for size in sizes)
        # Each has room for as many steps as another takes.
        most_steps = np.maximum.accumulate(self.workload.steps(client_ids))
        fit = int((most_steps * widest * np.arange(1, len(sizes) + 1) <= PLACES_AHEAD).sum())
        return fit if fit == len(sizes) else fit // size * size

    def batches(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> Iterator[Batches]:
        """See `Stepping`.

        Raises
        ------
        FedsimError
            If a client has an example whose label or token is none.
        """
        self.bench.data.require_usable(client_ids.tolist())
        return plan_batches(
            self.workload.work,
            [self.bench.data.indices[i] for i in client_ids],
            client_ids,
            randomness,
            round,
            self.workload.counts_of(client_ids),
        )

    def steps(self, batches: Batches, entering: Entering) -> Steps:
        """See `Stepping`."""
        if self._by_layers is not None:
            return LayerSteps(self.bench, self._by_layers, batches, entering.round)
        # A GPU's steps are captured, and bound by launches: they are made kernel by kernel.
        launched = isinstance(self.bench.step, LocalStep)
        if isinstance(self.path, StackedPath) and self._on_cpu and launched:
            return BlockSteps(self.bench, self.path, batches, entering.round)
        seeds = _seeds(entering) if self.draws else None
        make = AloneSteps if isinstance(self.path, PlainPath) and self._on_cpu else Steps
        return make(self.bench, batches, entering.round, seeds)

    @property
    def _on_cpu(self) -> bool:
        return self.bench.device.type == "cpu"

    @cached_property
    def _by_layers(self) -> AlonePath | None:
        """The path of clients that go alone, layer by layer."""
        if isinstance(self.path, StackedPath) and self.path.alone:
            return AlonePath(self.path)
        if isinstance(self.path, LayeredPath) and self._on_cpu:
            return self.path.one_by_one
        return None


@dataclass(frozen=True)
class ReleasedStepping:
    """With privacy for examples: every gradient is a release.

    Parameters
    ----------
    bench : Bench
    workload : Workload
    privacy : ExamplePrivacy
    way : Way
        To the gradients of single examples.
    draws : bool
        Whether the model draws in training.
    keeps_state : bool
        Whether the mechanism's state outlives a round.
    """

    bench: Bench
    workload: Workload
    privacy: ExamplePrivacy
    way: Way
    draws: bool
    keeps_state: bool

    @property
    def reports_loss(self) -> bool:
        """See `Stepping`."""
        return self.privacy.unprotected_metrics

    def ahead(self, client_ids: Ints, size: int) -> int:
        """Nobody: a client's ledger line is on disk before anything of its round is drawn."""
        return 0

    def batches(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> Iterator[Batches]:
        """See `Stepping`."""
        indices = [self.bench.data.indices[i] for i in client_ids]
        return self.privacy.batches(self.workload.work, indices, client_ids, randomness, round)

    def steps(self, batches: Batches, entering: Entering) -> Steps:
        """See `Stepping`."""
        data, work = self.bench.data, self.workload.work
        plans = [self.privacy.plan(work, data.size(i)) for i in entering.client_ids.tolist()]
        return PrivateSteps(
            self.bench,
            batches,
            entering.round,
            _seeds(entering) if self.draws else None,
            privacy=self.privacy,
            rows=self.way.rows,
            plans=[plan for plan in plans if plan is not None],
            entering=entering,
            keeps_state=self.keeps_state,
        )


def _seeds(entering: Entering) -> Seeds:
    return Seeds(entering.randomness, entering.client_ids, entering.round)

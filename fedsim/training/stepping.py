"""What clients step on: gradients as they are, or releases of their examples' gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from fedsim.training.alone_steps import AloneSteps, LayerSteps
from fedsim.training.batches import Batches, plan_batches
from fedsim.training.entering import Entering
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.hidden_draws import Seeds
from fedsim.training.paths.alone import AlonePath
from fedsim.training.paths.choice import Path
from fedsim.training.paths.examples import Way
from fedsim.training.paths.layered import LayeredPath
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.stacked import StackedPath
from fedsim.training.steps import Bench, PrivateSteps, Steps
from fedsim.training.workload import Workload

__all__ = ["OpenStepping", "ReleasedStepping", "Stepping"]


class Stepping(Protocol):
    """How a trainer's clients draw their batches, and make their steps."""

    @property
    def reports_loss(self) -> bool:
        """Whether clients say what their training loss was."""

    def batches(self, entering: Entering) -> Iterator[Batches]:
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

    def batches(self, entering: Entering) -> Iterator[Batches]:
        """See `Stepping`."""
        return plan_batches(
            self.workload.work,
            [self.bench.data.indices[i] for i in entering.client_ids],
            entering.client_ids,
            entering.randomness,
            entering.round,
            self.workload.counts_of(entering.client_ids),
        )

    def steps(self, batches: Batches, entering: Entering) -> Steps:
        """See `Stepping`."""
        on_cpu = self.bench.device.type == "cpu"
        if isinstance(self.path, StackedPath) and self.path.alone:
            return LayerSteps(self.bench, AlonePath(self.path), batches, entering.round)
        if isinstance(self.path, LayeredPath) and on_cpu:
            return LayerSteps(self.bench, self.path.one_by_one, batches, entering.round)
        seeds = _seeds(entering) if self.draws else None
        make = AloneSteps if isinstance(self.path, PlainPath) and on_cpu else Steps
        return make(self.bench, batches, entering.round, seeds)


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

    def batches(self, entering: Entering) -> Iterator[Batches]:
        """See `Stepping`."""
        return self.privacy.batches(
            self.workload.work,
            [self.bench.data.indices[i] for i in entering.client_ids],
            entering.client_ids,
            entering.randomness,
            entering.round,
        )

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
            denominators=[plan.denominator for plan in plans if plan is not None],
            entering=entering,
            keeps_state=self.keeps_state,
        )


def _seeds(entering: Entering) -> Seeds:
    return Seeds(entering.randomness, entering.client_ids, entering.round)

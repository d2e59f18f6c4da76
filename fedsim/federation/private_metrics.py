"""Evaluation within the guarantee: metrics that clients report, released as one noisy sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import MetricRecord
from flwr.serverapp import Grid

from fedsim.cohorts import Cohort
from fedsim.errors import BudgetSpentError
from fedsim.federation.accounting import Accounting
from fedsim.federation.client_metrics import (
    ClientEvaluation,
    EvaluationSettings,
    MetricsAggregator,
    OpenEvaluation,
)
from fedsim.federation.exchange import Recipients
from fedsim.federation.replies import Reply
from fedsim.mechanisms import Clipping, NoiseSource, Releaser
from fedsim.mechanisms.bounded_values import (
    Floats,
    ValueRange,
    joint_norm,
    joint_rows,
    split_sums,
)
from fedsim.privacy.digest import digest_of
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import ReleasePlan, evaluation_sampler
from fedsim.randomness import Draws, Purpose, Randomness
from fedsim.rows import DenseRows, Layout

EXAMPLES = "num-examples"


@dataclass(frozen=True)
class PrivateMetrics:
    """Which of clients' metrics are released with noise, and with how much.

    Guarantee: an evaluation is one Gaussian of this multiplier on a sum to which a client adds at
    most C, the norm of all its clamped numbers together.

    Parameters
    ----------
    ranges : sequence of ValueRange
        One a metric; others are not released.
    noise_multiplier : float
    hardened : bool
        As of `DPFedAvg`.

    Raises
    ------
    FedsimError
        If there is no metric.
    """

    ranges: Sequence[ValueRange]
    noise_multiplier: float
    hardened: bool = True

    def plan(self, cohort: Cohort, fraction: float) -> ReleasePlan[Clipping]:
        """What one evaluation releases, by this fraction of a cohort's population."""
        return ReleasePlan(
            level="client",
            sampler=evaluation_sampler(cohort, fraction),
            bound=Clipping(joint_norm(self.ranges)),
            noise=Independent(self.noise_multiplier, self.hardened),
        )

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of the numbers that an evaluation releases."""
        return tuple(name for one in self.ranges for name in one.shown)


class PrivateEvaluation(ClientEvaluation):
    """Releases metrics of clients that are sampled independently, as one noisy sum.

    Parameters
    ----------
    settings : EvaluationSettings
    metrics : PrivateMetrics
    rounds : callable returning Accounting
        The current accounting of the rounds, whose population and neighbours evaluations have.

    Attributes
    ----------
    plan : ReleasePlan
        What one evaluation releases.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        metrics: PrivateMetrics,
        rounds: Callable[[], Accounting],
    ) -> None:
        super().__init__(settings)
        self.metrics, self._rounds = metrics, rounds
        self.plan = plan = metrics.plan(rounds().plan.sampler, settings.fraction)
        # Keyed by all that this release follows from: other metrics have other noise.
        keyed = rounds().randomness
        release = digest_of({"rounds": keyed.release, "evaluation": plan})
        self._randomness = Randomness(keyed.seed, release)

    @property
    def accounting(self) -> Accounting:
        """Of evaluations, in the ledger of the rounds."""
        return replace(
            self._rounds(), kind="evaluation", plan=self.plan, randomness=self._randomness
        )

    def evaluators(self, server_round: int, grid: Grid) -> Recipients:
        """Each client independently, at the rate that is charged."""
        draws = Draws(self._randomness, level="client", amplified=self.plan.amplified)
        drawn = self.plan.sampler.draw(server_round, draws)
        participants, reachable = self.settings.participants, self.settings.reachable
        return participants.present(server_round, drawn, grid, reachable)

    def metrics_sum(self, server_round: int) -> MetricsRelease:
        """The noisy sum, written to the ledger before it is released."""
        return MetricsRelease(self.metrics, self.plan, self.accounting, server_round)


def evaluation_of(
    settings: EvaluationSettings,
    metrics: PrivateMetrics | None,
    rounds: Callable[[], Accounting],
    aggregate: MetricsAggregator | None,
    quantiles: bool,
) -> ClientEvaluation:
    """With noise if there are private metrics, else without."""
    if metrics is None:
        return OpenEvaluation(settings, aggregate, quantiles=quantiles)
    return PrivateEvaluation(settings, metrics, rounds)


class MetricsRelease:
    """One evaluation's sum: the ledger has its line before anything of it is released.

    Parameters
    ----------
    metrics : PrivateMetrics
    plan : ReleasePlan
    accounting : Accounting
        Of evaluations.
    round : int
    """

    def __init__(
        self,
        metrics: PrivateMetrics,
        plan: ReleasePlan[Clipping],
        accounting: Accounting,
        round: int,
    ) -> None:
        self._ranges, self._plan = metrics.ranges, plan
        self._accounting, self._round = accounting, round
        size = sum(one.size for one in metrics.ranges)
        layout = Layout.of({"metrics": torch.empty(size, dtype=torch.float64)})
        self._releaser = Releaser(plan, layout)
        self._total = self._releaser.start({})

    def add(self, reply: Reply) -> None:
        """Add what clients report; those without examples add zeros."""
        block = reply.block
        if not len(block.client_ids):
            return
        examples = block.metrics.get(EXAMPLES, np.ones(len(block.client_ids)))
        values = {name: np.where(examples > 0, v, np.nan) for name, v in block.metrics.items()}
        rows = joint_rows(self._ranges, values, len(examples))
        self._total.add(DenseRows(torch.from_numpy(rows)))

    def record(self) -> MetricRecord | None:
        """Noisy means and quantiles within their ranges; None if too few clients seem to be in.

        Raises
        ------
        BudgetSpentError
            As `release` does.
        """
        sums = split_sums(self._ranges, self.release())
        means = {name: v for one in self._ranges for name, v in one.summary(sums[one.name])}
        names = [name for name in sorted(means) if not math.isnan(means[name])]
        return MetricRecord({name: means[name] for name in names}) if names else None

    def release(self) -> Floats:
        """The noisy sums of all ranges, one after another.

        Raises
        ------
        BudgetSpentError
            If another process has spent the budget meanwhile; then nothing is released.
        """
        accounting = self._accounting
        norm, content = joint_norm(self._ranges), self._total.content()
        if (why := accounting.record(self._round, norm, content)) is not None:
            raise BudgetSpentError(why)
        generator = accounting.randomness.generator(
            Purpose.NOISE, level="client", round=self._round
        )
        source = NoiseSource(generator, self._plan.noise.hardened, self._round)
        released = self._releaser.release(self._total, source)
        return np.asarray(released.mean.numpy() * self._plan.denominator)

"""Evaluation within the guarantee: metrics that clients report, released as one noisy sum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import MetricRecord
from flwr.serverapp import Grid

from fedsim.errors import BudgetSpentError
from fedsim.federation.accounting import Accounting
from fedsim.federation.client_metrics import ClientEvaluation
from fedsim.federation.exchange import Recipients
from fedsim.federation.replies import Reply
from fedsim.mechanisms import NoiseSource, Releaser
from fedsim.mechanisms.bounded_values import (
    Floats,
    joint_norm,
    joint_rows,
    split_sums,
)
from fedsim.privacy.digest import digest_of
from fedsim.randomness import Draws, Purpose, Randomness
from fedsim.rows import DenseRows, Layout

EXAMPLES = "num-examples"


@dataclass(kw_only=True)
class PrivateEvaluation(ClientEvaluation):
    """Releases metrics of clients that are sampled independently, as one noisy sum.

    Parameters
    ----------
    rounds : Accounting
        Of the rounds, whose population and neighbours evaluations have.

    Attributes
    ----------
    released : PrivateMetrics
        Those of ``metrics``.
    plan : ReleasePlan
        What one evaluation releases.
    """

    rounds: Accounting

    def __post_init__(self) -> None:
        assert self.metrics.private is not None
        self.released = self.metrics.private
        self.plan = self.released.plan(self.rounds.plan.sampler, self.fraction)
        # Keyed by all that this release follows from: other metrics have other noise.
        keyed = self.rounds.randomness
        release = digest_of({"rounds": keyed.release, "evaluation": self.plan})
        self._randomness = Randomness(keyed.seed, release)

    @property
    def accounting(self) -> Accounting:
        """Of evaluations, in the ledger of the rounds."""
        return replace(self.rounds, kind="evaluation", plan=self.plan, randomness=self._randomness)

    def evaluators(self, server_round: int, grid: Grid) -> Recipients:
        """Each client independently, at the rate that is charged."""
        draws = Draws(self._randomness, level="client", amplified=self.plan.amplified)
        drawn = self.plan.sampler.draw(server_round, draws)
        return self.participants.present(server_round, drawn, grid, self.participants.reachable)

    def metrics_sum(self, server_round: int) -> MetricsRelease:
        """The noisy sum, written to the ledger before it is released."""
        return MetricsRelease(self, server_round)


class MetricsRelease:
    """One evaluation's sum: the ledger has its line before anything of it is released.

    Parameters
    ----------
    evaluation : PrivateEvaluation
    round : int
    """

    def __init__(self, evaluation: PrivateEvaluation, round: int) -> None:
        self._evaluation, self._round = evaluation, round
        self._ranges = evaluation.released.ranges
        size = sum(one.size for one in self._ranges)
        layout = Layout.of({"metrics": torch.empty(size, dtype=torch.float64)})
        self._releaser = Releaser(evaluation.plan, layout)
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
        accounting, plan = self._evaluation.accounting, self._evaluation.plan
        norm, content = joint_norm(self._ranges), self._total.content()
        if (why := accounting.record(self._round, norm, content)) is not None:
            raise BudgetSpentError(why)
        generator = accounting.randomness.generator(
            Purpose.NOISE, level="client", round=self._round
        )
        source = NoiseSource(generator, plan.noise.hardened, self._round)
        released = self._releaser.release(self._total, source)
        return np.asarray(released.mean.numpy() * plan.denominator)

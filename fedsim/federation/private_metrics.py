"""Private evaluation: the metrics that clients report, released as one noisy sum."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import MetricRecord
from flwr.serverapp import Grid

from fedsim.array_types import Floats
from fedsim.errors import BudgetSpentError, printable
from fedsim.federation.accounting import Accounting
from fedsim.federation.client_metrics import ClientEvaluation
from fedsim.federation.exchange import Recipients
from fedsim.federation.replies import Reply
from fedsim.mechanisms import NoiseSource, Releaser
from fedsim.mechanisms.bounded_values import joint_norm, joint_rows, split_sums
from fedsim.privacy.digest import digest_of
from fedsim.randomness import Draws, Purpose, Randomness
from fedsim.rows import DenseRows, Layout

_log = logging.getLogger("fedsim")


@dataclass(kw_only=True)
class PrivateEvaluation(ClientEvaluation):
    """Releases the metrics of independently sampled clients as one noisy sum.

    Parameters
    ----------
    rounds : Accounting
        Accounting of the rounds; evaluations have the same population and adjacency.

    Attributes
    ----------
    released : PrivateMetrics
        Which metrics are released, and with how much noise: ``metrics.private``.
    plan : ReleasePlan
        Release plan of one evaluation.
    """

    rounds: Accounting

    def __post_init__(self) -> None:
        assert self.metrics.private is not None
        self.released = self.metrics.private
        self.plan = self.released.plan(self.rounds.plan.sampler, self.fraction)
        # Keyed by everything that determines this release: two runs that differ in their metrics
        # must not share noise.
        keyed = self.rounds.randomness
        settings = {"evaluation": self.plan, "ranges": self.released.ranges}
        release = digest_of({"rounds": keyed.release, **settings})
        self._randomness = Randomness(keyed.seed, release)
        self._has_warned = False
        # If releases may end the run, its evaluations are charged together with its rounds.
        self.rounds.evaluations = self.accounting
        self.rounds.evaluations_every = self.metrics.every

    @property
    def accounting(self) -> Accounting:
        """Accounting of evaluations, in the ledger and budget of the rounds."""
        return replace(
            self.rounds,
            kind="evaluation",
            plan=self.plan,
            randomness=self._randomness,
            evaluations=None,
        )

    def evaluators(self, server_round: int, grid: Grid) -> Recipients:
        """Sample each client independently, at the rate that the ledger charges."""
        draws = Draws(self._randomness, level="client", amplified=self.plan.amplified)
        sampled = self.plan.sampler.draw(server_round, draws)
        return self.participants.available_recipients(
            server_round, sampled, grid, self.participants.reachable
        )

    def metrics_sum(self, server_round: int) -> MetricsRelease:
        """A new noisy sum; its ledger line is written before it is released."""
        return MetricsRelease(self, server_round)

    def warn_of_unreported(self, reported: Collection[str]) -> None:
        """Warn once of metrics that no client has ``reported``, whose release is noise alone.

        The warning changes nothing: what is released, and its cost, must not depend on replies.
        """
        unreported = [entry.name for entry in self.released.ranges if entry.name not in reported]
        if unreported and reported and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "no client reports %s, so that what is released of it is noise alone, and is "
                "charged; replies have %s.",
                ", ".join(unreported),
                printable(", ".join(sorted(reported))),
            )


class MetricsRelease:
    """The noisy sum of one evaluation's metrics; its ledger line is on disk before the release.

    Parameters
    ----------
    evaluation : PrivateEvaluation
    round : int
    """

    def __init__(self, evaluation: PrivateEvaluation, round: int) -> None:
        self._evaluation, self._round = evaluation, round
        self._ranges = evaluation.released.ranges
        size = sum(entry.size for entry in self._ranges)
        layout = Layout.of({"metrics": torch.empty(size, dtype=torch.float64)})
        self._releaser = Releaser(evaluation.plan, layout)
        self._total = self._releaser.start({})
        self._reported: set[str] = set()

    def add(self, reply: Reply) -> None:
        """Add the metrics of a reply's clients; a client of weight 0 (no examples) adds zeros."""
        block = reply.block
        if not len(block.client_ids):
            return
        self._reported |= block.metrics.keys()
        weighted_by = self._evaluation.keys.weighted_by
        examples = block.metrics.get(weighted_by, np.ones(len(block.client_ids)))
        values = {name: np.where(examples > 0, v, np.nan) for name, v in block.metrics.items()}
        rows = joint_rows(self._ranges, values, len(examples))
        self._total.add(DenseRows(torch.from_numpy(rows)))

    def record(self) -> MetricRecord | None:
        """Release noisy means and quantiles, within their ranges.

        None if the noisy counts of clients are too small for any of them.

        Raises
        ------
        BudgetSpentError
            As `release` does.
        """
        self._evaluation.warn_of_unreported(self._reported)
        sums = split_sums(self._ranges, self.release())
        means = {name: v for entry in self._ranges for name, v in entry.summary(sums[entry.name])}
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
        if (reason := accounting.record(self._round, joint_norm(self._ranges))) is not None:
            raise BudgetSpentError(reason)
        generator = accounting.randomness.generator(
            Purpose.NOISE, level="client", round=self._round
        )
        source = NoiseSource(generator, plan.noise.hardened, self._round)
        released = self._releaser.release(self._total, source)
        return np.asarray(released.mean.numpy() * plan.denominator)

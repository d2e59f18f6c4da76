"""Evidence and checks of private evaluations: noise, sampling, sensitivity, ledger lines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from whitebox import catalogue
from whitebox.clients import EXAMPLES, silent_clients
from whitebox.target import StrategyFactory

from fedsim.array_types import Floats
from fedsim.audit.findings import Finding, SampleChecks, invariant, make_checks
from fedsim.audit.noise_checks import NoiseSample
from fedsim.audit.sampling_checks import Sampled
from fedsim.engines import LocalGrid
from fedsim.federation.private_metrics import PrivateEvaluation
from fedsim.federation.replies import Reply
from fedsim.mechanisms.bounded_values import joint_norm
from fedsim.privacy.laws import declared_population
from fedsim.rows.block import Block
from fedsim.strategies import DPFedAvg

RUNS, ROUNDS = 4, 100
EXTREMES = (math.inf, -math.inf, math.nan, 1e300, -1e300, 0.0, 1.0, 0.5)
"""Values that a client may report."""
ROUNDING = 1e-6
"""Tolerance for rounding a row to the sum's grid."""


@dataclass(frozen=True, eq=False)
class MetricsEvidence:
    """Releases of metrics of no client, or of a single one.

    Parameters
    ----------
    strategies : callable
        Makes a strategy with private metrics from a seed.
    seed : int
    """

    strategies: StrategyFactory
    seed: int

    def checks(self) -> Iterator[SampleChecks]:
        """Samples and checks of a private evaluation."""
        yield lambda: self.noise, catalogue.NOISE
        yield lambda: self.sampled, catalogue.DRAWS
        yield lambda: self.same_seed_other_settings, catalogue.ANOTHER_RUN
        yield lambda: self.evaluated, _EVALUATED

    @property
    def _evaluations(self) -> list[PrivateEvaluation]:
        """Evaluations of runs with different seeds."""
        return [_evaluation(self.strategies(self.seed + run)) for run in range(RUNS)]

    @property
    def noise(self) -> NoiseSample:
        """Releases without replies, which are noise alone, in standard deviations of it."""
        runs = self._evaluations
        noise = [[run.metrics_sum(n).release() for n in range(1, ROUNDS + 1)] for run in runs]
        std = runs[0].plan.noise.multiplier * joint_norm(runs[0].released.ranges)
        units = np.array(noise) / std
        return NoiseSample.from_noise(units, [slice(0, units.shape[-1])])

    @property
    def same_seed_other_settings(self) -> tuple[Floats, str]:
        """Releases without replies of runs with one seed and different evaluations.

        If they shared noise, their difference would show sums without noise.
        """
        released = _evaluation(self.strategies(self.seed)).released
        louder = replace(released, noise_multiplier=1.25 * released.noise_multiplier)
        wider = replace(
            released,
            ranges=[replace(one, high=2 * one.high - one.low) for one in released.ranges],
        )
        rows = []
        for private in (released, louder, wider):
            evaluation = _evaluation(self.strategies(self.seed))
            other = replace(evaluation, metrics=replace(evaluation.metrics, private=private))
            noise = [other.metrics_sum(n).release() for n in range(1, ROUNDS + 1)]
            rows.append(np.concatenate(noise))
        examined = f"{ROUNDS} evaluations of each of three configs of one seed"
        return np.array(rows), examined

    @property
    def sampled(self) -> Sampled:
        """Clients that are asked to evaluate, in as many rounds as there are releases."""
        runs = self._evaluations
        population = declared_population(runs[0].plan.sampler)
        grid = LocalGrid(silent_clients(population, 1, ()))
        ids = [[run.evaluators(n, grid).client_ids for n in range(1, ROUNDS + 1)] for run in runs]
        return Sampled.from_cohorts(ids, runs[0].plan.event(), population)

    @property
    def evaluated(self) -> tuple[DPFedAvg, list[Floats]]:
        """A strategy, and how one client moves its evaluations, for each of `EXTREMES`."""
        quiet, loud = _evaluation(self.strategies(self.seed)), self.strategies(self.seed)
        evaluation = _evaluation(loud)
        names = [one.name for one in evaluation.released.ranges]
        moves = []
        for number, extreme in enumerate(EXTREMES, start=1):
            metrics = {n: np.array([extreme]) for n in names}
            metrics["num-examples"] = np.array([EXAMPLES])
            release = evaluation.metrics_sum(number)
            release.add(Reply(Block.sent(np.zeros(1, dtype=np.int64), None, metrics)))
            moves.append(release.release() - quiet.metrics_sum(number).release())
        return loud, moves


def _evaluation(strategy: DPFedAvg) -> PrivateEvaluation:
    assert isinstance(strategy.evaluation, PrivateEvaluation)
    return strategy.evaluation


def moved_metrics(strategy: DPFedAvg, moves: list[Floats]) -> Finding:
    """Whether no client moves an evaluation by more than the assumed sensitivity."""
    norm = joint_norm(_evaluation(strategy).released.ranges)
    lengths = [float(np.linalg.norm(move)) for move in moves]
    most = max(lengths)
    # Not `most > ...`: NaN must be a violation.
    fault = None if most <= norm * (1 + ROUNDING) else f"{most:.6g}"
    return invariant(f"{len(moves)} reports of one client", fault, f"at most {norm:.6g}")


def line_for_every_evaluation(strategy: DPFedAvg, moves: list[Floats]) -> Finding:
    """Whether each evaluation has one line in the ledger, with its event."""
    event = _evaluation(strategy).plan.event()
    lines = [(entry.kind, entry.round, entry.event) for entry in strategy.ledger.entries]
    expected = [("evaluation", number, event) for number in range(1, len(moves) + 1)]
    fault = None if lines == expected else f"{len(lines)} lines, or of other events"
    return invariant(f"{len(moves)} evaluations", fault, "one line each, of its own event")


_EVALUATED = (
    *make_checks("bound", ("what one client's metrics move", moved_metrics,
                         "numbers are not clamped to their ranges")),
    *make_checks("ledger", ("a line for every evaluation", line_for_every_evaluation,
                          "an evaluation is not charged")),
)  # fmt: skip

"""Successive halving: all runs make a few rounds, and only the best of them continue.

Jamieson and Talwalkar 2016, "Non-stochastic best arm identification and hyperparameter
optimization". Runs pause at a rung and resume from their checkpoints: a run that reaches its last
round ends with the same bytes as without halving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.config.plan import stopping
from fedsim.errors import FedsimError
from fedsim.runs.callbacks import Measure
from fedsim.runs.metrics import Row, recent_mean
from fedsim.runs.sweep.search import Setting, SweepRun, measure_of, require_validation

MOST_OUTCOMES = 10**100
"""Cap on the number of outcomes; with more, the share of delta would underflow."""


@dataclass(frozen=True)
class Halving:
    """Rounds after which settings are compared, and the share of them that continues.

    Attributes
    ----------
    factor : int
        One in ``factor`` settings continues from a rung, to ``factor`` times the rounds.
    first : int
        Rounds before the first rung.
    """

    factor: int
    first: int

    def rungs(self, rounds: int) -> list[int]:
        """The rounds after which runs are compared; the last entry is their last round."""
        lower = []
        rung = self.first
        while rung < rounds:
            lower.append(rung)
            rung *= self.factor
        return [*lower, rounds]

    def check(self, grid: Sequence[SweepRun]) -> None:
        """Refuse configs of runs that could not be compared or resumed.

        Raises
        ------
        FedsimError
        """
        if self.factor < 2:
            raise FedsimError(f"--halving = {self.factor}; it must be at least 2.")
        if len({run.config.rounds for run in grid}) > 1:
            raise FedsimError("--over rounds; with --halving all runs have the same rounds.")
        rounds = grid[0].config.rounds
        if not 1 <= self.first < rounds:
            raise FedsimError(
                f"--first-rounds = {self.first}; it must be from 1 to {rounds - 1}, one below "
                "rounds."
            )
        for run in grid:
            config = run.config
            if not config.checkpoint.every:
                raise FedsimError(
                    "checkpoint.every = 0; with --halving it must be at least 1, since runs "
                    "resume from their checkpoints."
                )
            if config.evaluate.private:
                raise FedsimError(
                    "evaluate.private = true; with --halving it must be false, since what the "
                    "evaluations of runs that are dropped would have cost is not planned for."
                )
            if not 1 <= config.evaluate.every <= self.first:
                raise FedsimError(
                    f"evaluate.every = {config.evaluate.every}; with --halving it must be from 1 "
                    f"to {self.first}, the rounds to the first rung, where runs are compared."
                )
            require_validation(config, "--halving")

    def outcomes(self, grid: Sequence[SweepRun]) -> int:
        """Number of ways to choose the settings that continue at each rung."""
        settings, count = len({run.setting for run in grid}), 1
        for _ in self.rungs(grid[0].config.rounds)[:-1]:
            survivors = max(settings // self.factor, 1)
            count, settings = count * math.comb(settings, survivors), survivors
        return count

    def dropped(
        self, rows: Sequence[tuple[SweepRun, Sequence[Row] | None]], rung: int
    ) -> dict[str, str]:
        """The runs that end at a rung, by label, each with a sentence that says why.

        Parameters
        ----------
        rows : sequence of (SweepRun, rows of metrics.csv up to the rung)
            None instead of rows for a run that failed; it ranks last.
        rung : int
            Round after which they are compared.
        """
        settings: dict[Setting, list[tuple[SweepRun, Sequence[Row] | None]]] = {}
        for run, of_run in rows:
            settings.setdefault(run.setting, []).append((run, of_run))
        scores = {point: _score(of_point) for point, of_point in settings.items()}
        keep = max(len(settings) // self.factor, 1)
        # Sorting is stable: among equal scores the first settings continue.
        ranking = sorted(scores, key=lambda point: -scores[point])
        measure = measure_of(rows[0][0].config)
        least = _score_text(scores[ranking[keep - 1]], measure)
        continued = f"{keep} of {len(settings)} settings continued, the last of them with {least}"
        return {
            run.label: f"Dropped after round {rung}: its setting had "
            f"{_score_text(scores[point], measure)}; {continued}."
            for place, point in enumerate(ranking)
            for run, of_run in settings[point]
            if place >= keep or of_run is None
        }


def outcomes(grid: Sequence[SweepRun], halving: Halving | None) -> int:
    """Upper bound on the number of different sets of releases that choices among runs allow."""
    count = 1 if halving is None else halving.outcomes(grid)
    for run in grid:
        count *= max(stopping(run.config.to_run_config()).possible_ends, 1)
    return min(count, MOST_OUTCOMES)


def _score_text(score: float, measure: Measure) -> str:
    if not math.isfinite(score):
        return f"no validation-{measure.name} of all its seeds"
    return f"validation-{measure.name} {measure.score(score):.4g}"


def _score(seeds: Sequence[tuple[SweepRun, Sequence[Row] | None]]) -> float:
    """Mean over a setting's seeds, higher is better; -inf if a run failed, to rank last."""
    scores = []
    for run, rows in seeds:
        measure = measure_of(run.config)
        value = None if rows is None else recent_mean(rows, f"validation-{measure.name}")
        if value is None or not math.isfinite(value):
            return -math.inf
        scores.append(measure.score(value))
    return float(np.mean(scores))

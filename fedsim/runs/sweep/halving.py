"""Successive halving: everybody goes a few rounds, the better part of them goes on.

Jamieson and Talwalkar 2016, "Non-stochastic best arm identification and hyperparameter
optimization". Members pause at a rung and go on from their checkpoints: whoever reaches its last
round has the bytes of a run that was never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedsim.config.plan import stopping
from fedsim.errors import FedsimError
from fedsim.runs.callbacks import Judge
from fedsim.runs.metrics import Row
from fedsim.runs.resolve import Resolved
from fedsim.runs.sweep.measure import Measure, Spread, validated
from fedsim.runs.sweep.members import Member, measure_of

MOST_OUTCOMES = 10**100
"""Of more, delta's share could not be written down."""

Setting = tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Halving:
    """When settings are compared, and how many go on.

    Attributes
    ----------
    factor : int
        Of the settings at a rung, one in so many goes on, to so many times the rounds.
    first : int
        Rounds to the first rung.
    """

    factor: int
    first: int

    def rungs(self, rounds: int) -> list[int]:
        """After which rounds members wait for each other; the last is their last."""
        between = []
        rung = self.first
        while rung < rounds:
            between.append(rung)
            rung *= self.factor
        return [*between, rounds]

    def check(self, grid: Sequence[Member], resolve_member: Callable[[Member], Resolved]) -> None:
        """Refuse members that could not be compared, or not go on.

        Raises
        ------
        FedsimError
        """
        if self.factor < 2:
            raise FedsimError(f"--halving = {self.factor}; it must be at least 2.")
        if len({member.config.rounds for member in grid}) > 1:
            raise FedsimError("--over rounds; with --halving all members have the same rounds.")
        rounds = grid[0].config.rounds
        if not 1 <= self.first < rounds:
            raise FedsimError(
                f"--first-rounds = {self.first}; it must be from 1 to {rounds - 1}, one below "
                "rounds."
            )
        for member in grid:
            config = member.config
            if not config.checkpoint.every:
                raise FedsimError(
                    "checkpoint.every = 0; with --halving it must be at least 1, since members go "
                    "on from their checkpoints."
                )
            if not 1 <= config.evaluate.every <= self.first:
                raise FedsimError(
                    f"evaluate.every = {config.evaluate.every}; with --halving it must be from 1 "
                    f"to {self.first}, the rounds to the first rung, where members are compared."
                )
            measure = f"validation-{measure_of(config).name}"
            Judge.of(resolve_member(member), "--halving by", measure)

    def outcomes(self, grid: Sequence[Member]) -> int:
        """In how many ways the settings that go on at each rung may be chosen."""
        left, ways = len({_setting(member) for member in grid}), 1
        for _ in self.rungs(grid[0].config.rounds)[:-1]:
            keep = max(left // self.factor, 1)
            ways, left = ways * math.comb(left, keep), keep
        return ways

    def dropped(
        self, rows: Sequence[tuple[Member, Sequence[Row] | None]], rung: int
    ) -> dict[str, str]:
        """The members that do not go on, by their labels, each with a sentence that says why.

        Parameters
        ----------
        rows : sequence of (Member, rows of metrics.csv up to the rung)
            None of one that failed, behind which all others come.
        rung : int
            After which round they are compared.
        """
        settings: dict[Setting, list[tuple[Member, Sequence[Row] | None]]] = {}
        for member, of_member in rows:
            settings.setdefault(_setting(member), []).append((member, of_member))
        scores = {point: _score(of_point) for point, of_point in settings.items()}
        keep = max(len(settings) // self.factor, 1)
        # Sorting is stable: of equals the first goes on.
        ranking = sorted(scores, key=lambda point: -scores[point])
        measure = measure_of(rows[0][0].config)
        least = _told(scores[ranking[keep - 1]], measure)
        went_on = f"{keep} of {len(settings)} settings went on, the last of them with {least}"
        return {
            member.label: f"Dropped after round {rung}: its setting had "
            f"{_told(scores[point], measure)}; {went_on}."
            for place, point in enumerate(ranking)
            for member, of_member in settings[point]
            if place >= keep or of_member is None
        }


def outcomes(grid: Sequence[Member], halving: Halving | None) -> int:
    """Out of how many sets of releases those of members may have chosen one; an upper bound."""
    ways = 1 if halving is None else halving.outcomes(grid)
    for member in grid:
        ways *= max(stopping(member.config.to_run_config()).times, 1)
    return min(ways, MOST_OUTCOMES)


def _setting(member: Member) -> Setting:
    return tuple((key, value) for key, value in member.point.items() if key != "seed")


def _told(score: float, measure: Measure) -> str:
    if not math.isfinite(score):
        return f"no validation-{measure.name} of all its seeds"
    value = score if measure.higher_is_better else -score
    return f"validation-{measure.name} {value:.4g}"


def _score(seeds: Sequence[tuple[Member, Sequence[Row] | None]]) -> float:
    """The mean over a setting's seeds, larger where it is better; one that fails is last."""
    scores = []
    for member, rows in seeds:
        measure: Measure = measure_of(member.config)
        value = None if rows is None else validated(rows, measure)
        if value is None or not math.isfinite(value):
            return -math.inf
        scores.append(value if measure.higher_is_better else -value)
    spread = Spread.of(scores)
    return -math.inf if spread is None else spread.mean

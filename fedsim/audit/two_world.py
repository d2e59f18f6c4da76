"""Two worlds: many runs with the canary, as many without, and a test that tells them apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fedsim.audit.claim import Claim, common_claim
from fedsim.audit.confidence import Box, box_p_value, epsilon_bound
from fedsim.audit.observe import Parameters, Plan, observe
from fedsim.audit.scores import Score, fitted_scores, is_fitted
from fedsim.audit.worlds import World, reach
from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import Layout

__all__ = ["TwoWorlds", "attack", "distinguish", "noticeable"]

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Tick = Callable[[int], None]

MOST_THRESHOLDS = 64
HANDICAP = 5.0
FACTORS = (1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
TRIALS = 3


@dataclass(frozen=True)
class TwoWorlds:
    """How well one canary was told from none.

    Attributes
    ----------
    world : str
    score : str
        Which of the scores the first half of the runs chose.
    box : Box
        Error rates on the second half.
    p_value : float
        Probability bound of a box so far below the claim's curve, if the claim is true.
    epsilon_bound : float
        Lower bound on epsilon at the claim's delta, from a threshold of its own.
    moves : float64 ``[runs, rounds, d]``
        What all runs released.
    """

    world: str
    score: str
    box: Box
    p_value: float
    epsilon_bound: float
    moves: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)), repr=False, compare=False)


def attack(
    plan: Plan, world: World, start: Parameters, runs: int, risk: float, seed: int, tick: Tick
) -> tuple[TwoWorlds, Claim]:
    """Run ``runs`` times without and ``runs`` times with the canary, and compare.

    Parameters
    ----------
    risk : float
        Probability with which the box and the bound may each be wrong.
    tick : callable
        Told the number of runs made, now and then.
    """
    strategy = plan.strategy(seed)
    layout = Layout.of(start)
    population = strategy.cohort.population
    assert population is not None
    if population < 2:
        raise FedsimError(
            f"cohort.population is {population}; an audit needs a canary and somebody else."
        )
    scale = reach(strategy.mechanism, layout)
    draws = Randomness(seed).generator(Purpose.AUDIT, level="run")
    seeds = draws.integers(2**63, size=(2, runs))
    tables: list[Floats] = []
    claims: set[Claim] = set()
    for side, present in enumerate((False, True)):
        trainer = world.trainer(
            population,
            layout.d,
            scale,
            present=present,
            neighbour=strategy.cohort.adjacency,
            sides=strategy.mechanism.side_names,
        )
        for number in range(runs):
            seen = observe(plan, trainer, start, int(seeds[side, number]))
            tables.append(seen.table())
            claims.add(seen.claim)
            tick(1)
    claim = common_claim(claims)
    shown = _stacked(tables)
    direction = world.canary(layout.d).numpy()
    result = distinguish(world.name, shown[:runs], shown[runs:], direction, claim, risk)
    return replace(result, moves=shown[:, :, : layout.d]), claim


def _stacked(tables: list[Floats]) -> Floats:
    """``[runs, rounds, width]``: a run in which no round succeeded has shown fewer numbers."""
    width = max(table.shape[1] for table in tables)
    return np.stack([np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables])


def distinguish(
    world: str, without: Floats, present: Floats, direction: Floats, claim: Claim, risk: float
) -> TwoWorlds:
    """Choose score and thresholds on the first half of the runs, count on the second.

    Parameters
    ----------
    without, present : float64 ``[runs, rounds, width]``
    direction : float64 ``[d]``
        Where the canary pulls.
    """
    half = len(without) // 2
    if half < 1 or len(without) != len(present):
        raise FedsimError(f"runs is {len(without)} and {len(present)}; each needs at least 2.")
    rate = claim.events[0].rate
    scores = fitted_scores(without[:half], present[:half], direction, rate)
    chosen = _choose(scores, without[:half], present[:half], claim, risk)
    fresh = len(without) - half

    def count(test: _Test) -> tuple[Counts, Counts]:
        score = scores[test.score]
        return _errors(score(without[half:]), score(present[half:]), np.array([test.threshold]))

    against_curve, for_epsilon = chosen
    fp, fn = count(against_curve)
    box = Box(int(fp[0]), int(fn[0]), fresh, risk)
    p_value = float(box_p_value(fp, fn, fresh, claim)[0])
    bound = float(epsilon_bound(*count(for_epsilon), fresh, risk, claim.delta)[0])
    return TwoWorlds(world, against_curve.score, box, p_value, bound)


@dataclass(frozen=True)
class _Test:
    score: str
    threshold: float


def _choose(
    scores: Mapping[str, Score], without: Floats, present: Floats, claim: Claim, risk: float
) -> tuple[_Test, _Test]:
    """The test that best refutes the claim, and the one that proves the largest epsilon."""
    trials = len(without)
    refuting, proving = [], []
    for name, score in scores.items():
        x, y = score(without), score(present)
        thresholds = _thresholds(x, y)
        fp, fn = _errors(x, y, thresholds)
        p_values = box_p_value(fp, fn, trials, claim)
        bounds = epsilon_bound(fp, fn, trials, risk, claim.delta)
        # A score looks better than it is on the runs that it was fitted to.
        handicap = HANDICAP if is_fitted(name) else 0.0
        first = int(np.lexsort((fp + fn, p_values))[0])
        most = int(bounds.argmax())
        evidence = math.log(p_values[first]) + handicap
        refuting.append((evidence, _Test(name, float(thresholds[first]))))
        proving.append((handicap / 10 - bounds[most], _Test(name, float(thresholds[most]))))
    return min(refuting, key=_first)[1], min(proving, key=_first)[1]


def _first(pair: tuple[float, _Test]) -> float:
    return pair[0]


def _thresholds(x: Floats, y: Floats) -> Floats:
    """Quantiles of all scores, half way between neighbours."""
    values = np.unique(np.concatenate([x, y]))
    middles = (values[1:] + values[:-1]) / 2 if len(values) > 1 else values
    if len(middles) <= MOST_THRESHOLDS:
        return np.asarray(middles)
    return np.asarray(middles[np.linspace(0, len(middles) - 1, MOST_THRESHOLDS).astype(int)])


def _errors(x: Floats, y: Floats, thresholds: Floats) -> tuple[Counts, Counts]:
    """False positives among ``x`` and false negatives among ``y``, ``[thresholds]`` each."""
    fp = len(x) - np.searchsorted(np.sort(x), thresholds, side="right")
    fn = np.searchsorted(np.sort(y), thresholds, side="right")
    return fp.astype(np.int64), fn.astype(np.int64)


def noticeable(claim: Claim, runs: int, risk: float, seed: int) -> float | None:
    """Smallest of `FACTORS` by which noise could be too small and be noticed every time.

    An ideal canary on the claimed Gaussians, with that much less noise, is audited a few
    times; None if even the largest factor escapes.
    """
    draws = Randomness(seed).generator(Purpose.AUDIT, level="run", part=9)
    return next(
        (
            factor
            for factor in FACTORS
            if all(_caught(claim, factor, runs, risk, draws) for _ in range(TRIALS))
        ),
        None,
    )


def _caught(
    claim: Claim, factor: float, runs: int, risk: float, draws: np.random.Generator
) -> bool:
    events = [event for event in claim.events for _ in range(event.count)]
    std = np.array([event.total_noise_multiplier for event in events]) / factor
    shift = np.array([2.0 if event.relation == "replace-one" else 1.0 for event in events])
    without = std * draws.standard_normal((runs, len(events)))
    takes_part = draws.random((runs, len(events))) < [event.rate for event in events]
    present = shift * takes_part + std * draws.standard_normal((runs, len(events)))
    result = distinguish("", without[:, :, None], present[:, :, None], np.ones(1), claim, risk)
    return result.p_value <= risk

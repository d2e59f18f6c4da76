"""Two worlds: many runs with the canary, as many without, and a test that tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsim.audit.canaries import World, reach
from fedsim.audit.claim import Claim, common_claim
from fedsim.audit.confidence import Box, box_p_value, epsilon_bound
from fedsim.audit.runs import Parameters, Plan, observe
from fedsim.audit.scores import fitted_scores
from fedsim.errors import FedsimError
from fedsim.mechanisms import Layout
from fedsim.randomness import Purpose, Randomness

__all__ = ["TwoWorlds", "attack", "distinguish"]

Floats = npt.NDArray[np.float64]
Tick = Callable[[int], None]

MOST_THRESHOLDS = 100


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
    """

    world: str
    score: str
    box: Box
    p_value: float
    epsilon_bound: float


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
    scale = reach(strategy.mechanism, layout)
    seeds = Randomness(seed).generator(Purpose.AUDIT).integers(2**63, size=(2, runs))
    seen: list[Floats] = []
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
        tables = []
        for number in range(runs):
            table, claim = observe(plan, trainer, start, int(seeds[side, number]))
            tables.append(table)
            claims.add(claim)
            tick(1)
        seen.append(np.stack(tables))
    claim = common_claim(claims)
    direction = world.canary(layout.d).numpy()
    return distinguish(world.name, seen[0], seen[1], direction, claim, risk), claim


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
    scores = fitted_scores(without[:half], present[:half], direction)
    best: tuple[float, float, str, float] | None = None
    widest: tuple[float, str, float] | None = None
    for name, score in scores.items():
        x, y = score(without[:half]), score(present[:half])
        thresholds = _thresholds(x, y)
        fp, fn = _errors(x, y, thresholds)
        p_values = box_p_value(fp, fn, half, claim)
        k = int(np.lexsort((fp + fn, p_values))[0])
        if best is None or (p_values[k], fp[k] + fn[k]) < best[:2]:
            best = (float(p_values[k]), float(fp[k] + fn[k]), name, float(thresholds[k]))
        bounds = epsilon_bound(fp, fn, half, risk, claim.delta)
        k = int(bounds.argmax())
        if widest is None or bounds[k] > widest[0]:
            widest = (float(bounds[k]), name, float(thresholds[k]))
    assert best is not None
    assert widest is not None
    rest = len(without) - half
    fp, fn = _errors(
        scores[best[2]](without[half:]), scores[best[2]](present[half:]), np.array([best[3]])
    )
    p_value = float(box_p_value(fp, fn, rest, claim)[0])
    box = Box(int(fp[0]), int(fn[0]), rest, risk)
    score = scores[widest[1]]
    fp, fn = _errors(score(without[half:]), score(present[half:]), np.array([widest[2]]))
    bound = float(epsilon_bound(fp, fn, rest, risk, claim.delta)[0])
    return TwoWorlds(world, best[2], box, p_value, bound)


def _thresholds(x: Floats, y: Floats) -> Floats:
    """Quantiles of all scores, half way between neighbours."""
    values = np.unique(np.concatenate([x, y]))
    middles = (values[1:] + values[:-1]) / 2 if len(values) > 1 else values
    if len(middles) <= MOST_THRESHOLDS:
        return np.asarray(middles)
    return np.asarray(middles[np.linspace(0, len(middles) - 1, MOST_THRESHOLDS).astype(int)])


def _errors(
    x: Floats, y: Floats, thresholds: Floats
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """False positives among ``x`` and false negatives among ``y``, ``[thresholds]`` each."""
    fp = len(x) - np.searchsorted(np.sort(x), thresholds, side="right")
    fn = np.searchsorted(np.sort(y), thresholds, side="right")
    return fp.astype(np.int64), fn.astype(np.int64)

"""Whole runs of still clients: what is released is noise, and who is asked is the sampler's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import chdtr

from fedsim.audit.charges import charge_checks
from fedsim.audit.checks import Check, invariant
from fedsim.audit.draws import draw_checks
from fedsim.audit.inclusion import inclusion_checks
from fedsim.audit.noise import noise_checks, pairs_of_rounds, repeats
from fedsim.audit.observe import Observation, Parameters, Plan, columns, observe, parameters
from fedsim.audit.standard import MeasuredNoise, in_units, shaped
from fedsim.audit.worlds import Canaries, orthogonal, reach, still
from fedsim.cohorts import Cohort, InclusionSampler
from fedsim.errors import FedsimError
from fedsim.privacy import Event
from fedsim.rows import Layout
from fedsim.strategies import DPFedAvg

__all__ = ["MOST_ROUNDS", "conformance", "model_for", "unrelated"]

Floats = npt.NDArray[np.float64]

MOST_ROUNDS = 1000
RUNS = 2
MORE_DRAWS, FEW_PARAMETERS = 4, 8
VALUES = 2**18
SMALL, LARGE = 512, 2048
FEW = 3
SLACK = 1e-6


def model_for(plan: Plan) -> Parameters:
    """As many parameters as whole runs can afford: more show more of the noise."""
    strategy = plan.strategy(1)
    d = LARGE if plan.rounds <= VALUES // LARGE else SMALL
    if strategy.placement == "client":
        d = SMALL  # a share each, with noise of its own
    brief = Plan(plan.strategy, min(FEW, plan.rounds))
    start = parameters(64)
    if shaped(observe(brief, _nobody(strategy, start), start, 1).states):
        d = SMALL  # the units of noise are found anew in every round
    return parameters(d)


def conformance(plan: Plan, start: Parameters, seed: int) -> tuple[list[Check], MeasuredNoise]:
    """Every test of whole runs, and how large the noise is.

    Two runs of different seeds show their noise and draws, and some of a smaller model more
    draws; another has the first one's seed
    and clients that each move a coordinate of their own, so that what it released more is
    what each of them added.

    Parameters
    ----------
    start : mapping of name to Tensor
        See `model_for`.
    """
    strategy = plan.strategy(seed)
    rounds = min(plan.rounds, MOST_ROUNDS)
    plan = Plan(plan.strategy, rounds)
    mechanism, denominator = strategy.mechanism, strategy.cohort.expected_size
    runs = [observe(plan, _nobody(strategy, start), start, seed + k) for k in range(RUNS)]
    if isinstance(runs[0].error, FedsimError):
        raise runs[0].error
    population = strategy.cohort.population
    assert population is not None
    layout = Layout.of(start)
    units = np.stack([in_units(seen, mechanism, layout, denominator) for seen in runs])
    layers = columns(start)
    noise = MeasuredNoise.of(units, layers, mechanism, layout, denominator)
    event = strategy.plan.event()
    moving = _moving(plan, strategy, start, seed)
    checks = [_silent(units)]
    if not checks[0].p_value:
        return [*checks, *charge_checks([*runs, moving], event)], noise
    # Layers that have no noise at all are found by the size of what is left.
    z = units / np.where(noise.stds > 0, noise.stds, np.median(noise.stds))
    checks += noise_checks(z, layers, np.stack([seen.sizes for seen in runs]))
    few = parameters(FEW_PARAMETERS)
    more = [observe(plan, _nobody(strategy, few), few, seed + RUNS + k) for k in range(MORE_DRAWS)]
    checks += _drawn([seen.asked for seen in (*runs, *more)], strategy.cohort, event, rounds)
    checks += [
        _same_draws(runs[0], moving),
        _each_adds(runs[0], moving, noise, event, population),
        _system(plan, strategy, start),
        *charge_checks([*runs, moving], event),
    ]
    return checks, noise


def _drawn(
    asked: Sequence[Sequence[npt.NDArray[np.int64]]], cohort: Cohort, event: Event, rounds: int
) -> list[Check]:
    if isinstance(cohort, InclusionSampler):
        chances = np.stack([cohort.probabilities(t) for t in range(1, rounds + 1)])
        return inclusion_checks(asked, chances, event)
    assert cohort.population is not None
    return draw_checks(asked, event, cohort.population)


def _nobody(strategy: DPFedAvg, start: Parameters) -> Canaries:
    population = strategy.cohort.population
    assert population is not None
    return still(population, Layout.of(start).d, strategy.mechanism.side_names)


def _moving(plan: Plan, strategy: DPFedAvg, start: Parameters, seed: int) -> Observation:
    layout, population = Layout.of(start), strategy.cohort.population
    assert population is not None
    scale = reach(strategy.mechanism, layout)
    sides = strategy.mechanism.side_names
    loud = min(population, layout.d)
    trainer = orthogonal(loud, layout.d, scale, sides)
    return observe(plan, trainer.but(silent=population - loud), start, seed)


def _silent(units: Floats) -> Check:
    runs, rounds, _ = units.shape
    without = (units == 0).all(2)
    broken = None
    if not np.isfinite(units).all():
        broken = "a number that is not finite"
    elif without.any():
        first = int(np.nonzero(without.any(0))[0][0]) + 1
        broken = f"{int(without.sum())} rounds without any noise, the first of them round {first}"
    return invariant(
        "noise", "presence", f"{runs} x {rounds} rounds", broken, "noise in every round"
    )


def _same_draws(nobody: Observation, moving: Observation) -> Check:
    broken = None
    for number, (before, after) in enumerate(zip(nobody.asked, moving.asked, strict=True), 1):
        if not np.array_equal(np.sort(before), np.sort(after)):
            broken = f"others were asked in round {number} when clients sent something else"
            break
    return invariant(
        "sampler", "draws and data", f"{len(nobody.asked)} rounds of one seed, twice", broken,
        "the same clients whatever they send",
    )  # fmt: skip


def _each_adds(
    nobody: Observation, moving: Observation, noise: MeasuredNoise, event: Event, population: int
) -> Check:
    """Each client's own coordinate holds what it added: nothing, or one row, never more."""
    rounds = 1 if shaped(moving.states) else len(moving.moves)
    d = nobody.moves.shape[1]
    silent = population - min(population, d)
    allowed = 1 / event.total_noise_multiplier
    most, whose, broken = 0.0, "nobody", None
    for index in range(rounds):
        # In a state that moves on, equal draws have different sizes: units set them right.
        quiet, loud = (noise.of_round(seen, index) for seen in (nobody, moving))
        added = moving.moves[index] / loud - nobody.moves[index] / quiet
        asked = np.zeros(d, dtype=np.bool_)
        ids = moving.asked[index] - silent
        asked[ids[ids >= 0]] = True
        if np.abs(added[~asked]).max(initial=0.0) > 1e-3 * allowed:
            broken = f"somebody who was not asked in round {index + 1} moved the model"
            break
        if not np.abs(added).max() <= most:
            most = float(np.abs(added).max())
            whose = f"client {int(np.abs(added).argmax()) + silent} in round {index + 1}"
    p = 0.0 if broken else _size_p(most, allowed, noise)
    return Check(
        "bound", "what each client adds", f"{rounds} rounds, each client on its own coordinate",
        broken or f"{most:.4g} std of the noise, {whose}", f"{allowed:.4g} at most", p,
    )  # fmt: skip


def _size_p(most: float, allowed: float, noise: MeasuredNoise) -> float:
    if not most < np.inf:
        return 0.0
    if most == 0:
        return 1.0
    ratio = (allowed * (1 + SLACK) / most) ** 2
    return min(1.0, noise.layers * float(chdtr(noise.values, noise.values * ratio)))


def _system(plan: Plan, strategy: DPFedAvg, start: Parameters) -> Check:
    """With entropy from the system two runs have nothing in common, not even with no seed."""
    few = Plan(plan.strategy, min(FEW, plan.rounds))
    runs: Sequence[Observation] = [
        observe(few, _nobody(strategy, start), start, None) for _ in range(2)
    ]
    check = repeats(np.stack([seen.moves for seen in runs]), f"2 x {few.rounds} rounds")
    entropies = {entry.entropy for seen in runs for entry in seen.entries}
    broken = check.measured if not check.p_value else None
    if entropies != {"system"}:
        broken = f"the ledger says entropy {' and '.join(sorted(entropies))}"
    return invariant(
        "noise", "noise of the system's", check.looked_at, broken, "never the same, and named so"
    )


def unrelated(plan: Plan, rival: Plan, seed: int) -> Check:
    """Two runs of one seed that are not the same run: their noise may have nothing in common.

    Else the difference of what they released shows sums without noise.
    """
    start = parameters(SMALL)
    rows = []
    for contender in (plan, rival):
        few = Plan(contender.strategy, min(FEW, contender.rounds))
        moves = observe(few, _nobody(contender.strategy(seed), start), start, seed).moves
        # In units of its own first standard deviation, whatever that is.
        norms = np.maximum(np.sqrt(np.square(moves).mean(1, keepdims=True)), 1e-300)
        rows.append(moves / norms)
    looked = f"{len(rows[0])} rounds each of two runs of one seed, at other noise multipliers"
    return pairs_of_rounds(np.concatenate(rows), looked, "noise of another run")

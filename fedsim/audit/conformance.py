"""Whole runs of still clients: what is released is noise, and who is asked is the sampler's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsim.audit.adversarial_clients import failing, several
from fedsim.audit.checks import Check, invariant
from fedsim.audit.ledger_checks import charge_checks
from fedsim.audit.low_bits import grid_checks
from fedsim.audit.neighbouring_runs import size_check
from fedsim.audit.noise_checks import covariance_check, noise_checks, pairs_of_rounds, repeats
from fedsim.audit.noise_scale import MeasuredNoise, Scale, in_units, shaped
from fedsim.audit.observe import (
    Observation,
    Parameters,
    Plan,
    columns,
    observe,
    observe_resumed,
    parameters,
)
from fedsim.audit.sampling_checks import draw_checks, inclusion_checks
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
ROUNDS_FAILING = 20
RESUMED = 6
SYSTEM_ROUNDS, DEEP_SYSTEM_ROUNDS = 1000, 10_000
"""Releases with entropy from the system: two are equal if it has fewer than about 2^16 seeds."""


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


def conformance(
    plan: Plan, start: Parameters, seed: int, *, deep: bool = False
) -> tuple[list[Check], MeasuredNoise]:
    """Every test of whole runs, and how large the noise is.

    Two runs of different seeds show their noise and draws, and some of a smaller model more
    draws; others have the first one's seed and clients that each move a coordinate of their own,
    so that what they released more is what each of them added.

    Parameters
    ----------
    start : mapping of name to Tensor
        See `model_for`.
    deep : bool
        Whether to look at many more releases with entropy from the system.
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
    in_both = [in_units(seen, mechanism, layout, denominator) for seen in runs]
    units, steps = (np.stack(both) for both in zip(*in_both, strict=True))
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
    if noise.stds.all():
        checks += grid_checks(steps, layers)
    few = parameters(FEW_PARAMETERS)
    more = [observe(plan, _nobody(strategy, few), few, seed + RUNS + k) for k in range(MORE_DRAWS)]
    small = [in_units(seen, mechanism, Layout.of(few), denominator)[0] for seen in more]
    checks.append(covariance_check(np.concatenate(small), columns(few)))
    checks += _drawn([seen.asked for seen in (*runs, *more)], strategy.cohort, event, rounds)
    checks += [
        _same_draws(runs[0], moving),
        _each_adds(runs[0], moving, noise, event, population),
        *_several(plan, strategy, start, seed, runs[0], noise),
        _resumed(plan, strategy, start, seed, runs[0]),
        *_system(plan, strategy, deep),
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
    looked = f"{rounds} rounds, each client on its own coordinate"
    silent = population - min(population, nobody.moves.shape[1])
    added = _Added(noise, silent)
    for index in range(rounds):
        added.take(nobody, moving, index)
    return added.check("what each client adds", looked, event)


class _Added:
    """The most that clients added to their own coordinates, in standard deviations of noise."""

    def __init__(self, noise: MeasuredNoise, silent: int = 0) -> None:
        self._noise, self._silent = noise, silent
        self._most, self._whose = 0.0, "nobody"
        self._strangers: tuple[float, int] = (0.0, 0)

    def take(self, nobody: Observation, moving: Observation, index: int, turn: int = 0) -> None:
        """Compare a round of two runs of one seed."""
        # In a state that moves on, equal draws have different sizes: units set them right.
        quiet, loud = (self._noise.of_round(seen, index) for seen in (nobody, moving))
        added = np.abs(moving.moves[index] / loud - nobody.moves[index] / quiet)
        asked = np.zeros(len(added), dtype=np.bool_)
        ids = moving.asked[index] - self._silent
        asked[ids[(ids >= 0) & (ids < len(added))]] = True
        self._strangers = max(
            self._strangers, (float(added[~asked].max(initial=0.0)), index + 1 + turn)
        )
        if not added.max() <= self._most:
            self._most = float(added.max())
            client = int(added.argmax()) + self._silent
            self._whose = f"client {client} in round {index + 1 + turn}"

    def check(self, name: str, looked: str, event: Event) -> Check:
        """Against what the event allows."""
        allowed = 1 / event.total_noise_multiplier
        moved, number = self._strangers
        if moved > 1e-3 * allowed:
            broken = f"somebody who was not asked in round {number} moved the model"
            return invariant("bound", name, looked, broken, "nobody who is not asked does")
        return size_check(name, looked, self._most, allowed, self._noise, self._whose)


def _several(
    plan: Plan,
    strategy: DPFedAvg,
    start: Parameters,
    seed: int,
    nobody: Observation,
    noise: MeasuredNoise,
) -> list[Check]:
    """Several canaries at once, of many lengths; and several clients that fail at once."""
    layout, mechanism = Layout.of(start), strategy.mechanism
    population, sides = strategy.cohort.population, strategy.mechanism.side_names
    assert population is not None
    half = Scale.of(mechanism, mechanism.init(layout), layout).half
    rounds, turns = plan.rounds, [0]
    if shaped(nobody.states) or mechanism.init(layout):
        # Later rounds depend on what was released before: the first one, again and again.
        rounds, turns = 1, list(range(ROUNDS_FAILING))
    added = _Added(noise)
    for turn in turns:
        clients = several(population, half, sides, turn)
        seen = observe(Plan(plan.strategy, rounds), clients, start, seed)
        for index in range(rounds):
            added.take(nobody, seen, index, turn)
    looked = f"{rounds * len(turns)} rounds of 1 to all clients at once, of .5 to 5 C"
    checks = [added.check("what several clients add", looked, strategy.plan.event())]
    if strategy.placement == "server":
        checks.append(_failures(plan, strategy, seed))
    return checks


def _failures(plan: Plan, strategy: DPFedAvg, seed: int) -> Check:
    """However many fail, and in whatever way, what is released is the same."""
    few, sides = parameters(FEW_PARAMETERS), strategy.mechanism.side_names
    rounds = min(ROUNDS_FAILING, plan.rounds)
    plan = Plan(plan.strategy, rounds)
    population = strategy.cohort.population
    assert population is not None
    ways = {"raises": None, "sends NaN": np.nan, "sends an infinity": np.inf}
    runs = {
        way: observe(plan, failing(population, FEW_PARAMETERS, sides, row), few, seed)
        for way, row in ways.items()
    }
    if not strategy.mechanism.init(Layout.of(few)) and not sides:
        # There a client that sends zeros adds what one that fails does.
        runs["sends zeros"] = observe(plan, _nobody(strategy, few), few, seed)
    (first, reference), *others = runs.items()
    broken = None if reference.released == rounds else f"{reference.released} of {rounds} rounds"
    for way, seen in others:
        differ = np.flatnonzero((seen.moves != reference.moves).any(1))
        if len(differ) and broken is None:
            broken = (
                f"round {differ[0] + 1} differs between several clients of which each {first} and "
                f"as many of which each {way}"
            )
    return invariant(
        "plan", "several fail at once", f"{rounds} rounds, each in {len(runs)} ways", broken,
        "every round released, and the same",
    )  # fmt: skip


def _resumed(
    plan: Plan, strategy: DPFedAvg, start: Parameters, seed: int, whole: Observation
) -> Check:
    """A run that is stopped and resumed goes on as if it had not been, and draws nothing again."""
    rounds = min(RESUMED, plan.rounds)
    looked = f"{rounds} rounds, stopped after {rounds // 2}"
    if rounds < 2:
        return invariant("noise", "resume", looked, None, "too few rounds to stop in between")
    few = Plan(plan.strategy, rounds)
    moves, entries = observe_resumed(few, _nobody(strategy, start), start, seed, rounds // 2)
    broken = None
    if not np.array_equal(moves, whole.moves[:rounds]):
        first = int(np.flatnonzero((moves != whole.moves[:rounds]).any(1))[0]) + 1
        broken = f"round {first} of the resumed run differs"
    elif [entry.round for entry in entries] != list(range(1, rounds + 1)):
        broken = f"the ledger has lines for rounds {[entry.round for entry in entries]}"
    return invariant("noise", "resume", looked, broken, "the same rounds as without a stop")


def _system(plan: Plan, strategy: DPFedAvg, deep: bool) -> list[Check]:
    """With entropy from the system no two rounds have noise in common, whatever the run."""
    total = DEEP_SYSTEM_ROUNDS if deep else SYSTEM_ROUNDS
    rounds = min(plan.rounds, MOST_ROUNDS)
    few = parameters(FEW_PARAMETERS)
    plan = Plan(plan.strategy, rounds)
    runs = [
        observe(plan, _nobody(strategy, few), few, None) for _ in range(max(2, -(-total // rounds)))
    ]
    moves = np.concatenate([seen.moves for seen in runs])
    check = repeats(moves, f"{len(moves):,} rounds of {len(runs)} runs")
    entropies = {entry.entropy for seen in runs for entry in seen.entries}
    broken = check.measured if not check.p_value else None
    if entropies != {"system"}:
        broken = f"the ledger says entropy {' and '.join(sorted(entropies))}"
    noise = invariant(
        "noise", "noise of the system's", check.looked_at, broken, "never the same, and named so"
    )
    return [noise, _system_draws(strategy.cohort, runs, check.looked_at)]


def _system_draws(cohort: Cohort, runs: Sequence[Observation], looked: str) -> Check:
    """Nor are the same clients sampled again, where that many could be."""
    asked = [np.sort(ids).tobytes() for seen in runs for ids in seen.asked]
    population, q = cohort.population, cohort.expected_size / (cohort.population or 1)
    assert population is not None
    # Two cohorts are equal with this probability, at most, if they are independent.
    log_p = population * np.log(q * q + (1 - q) ** 2) + np.log(population)
    again = len(asked) - len(set(asked))
    unlikely = log_p + 2 * np.log(max(len(asked), 2)) < np.log(1e-12)
    return invariant(
        "sampler", "samples of the system's", looked,
        f"{again} cohorts were sampled before" if again and unlikely else None,
        "no cohort is sampled again" if unlikely else "too few clients to tell",
    )  # fmt: skip


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

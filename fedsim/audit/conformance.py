"""Whole runs of still clients: what is released is noise, and who is asked is the sampler's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsim.audit.adversarial_clients import failing_clients, several_canaries
from fedsim.audit.checks import Check, Floats, invariant
from fedsim.audit.ledger_checks import charge_checks
from fedsim.audit.neighbouring_runs import size_check
from fedsim.audit.noise_checks import (
    covariance_check,
    grid_checks,
    noise_checks,
    pairs_of_rounds,
    repeats,
)
from fedsim.audit.noise_scale import MeasuredNoise, Scale, in_units, shaped
from fedsim.audit.observation import (
    Observation,
    Parameters,
    Target,
    columns,
    observe,
    observe_resumed,
    parameters,
)
from fedsim.audit.sampling_checks import draw_checks, inclusion_checks
from fedsim.audit.worlds import one_coordinate_each, reach
from fedsim.cohorts import InclusionSampler
from fedsim.errors import FedsimError
from fedsim.rows import Layout

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


def model_for(target: Target) -> Parameters:
    """As many parameters as whole runs can afford: more show more of the noise."""
    start, few = parameters(64), target.with_rounds(min(FEW, target.rounds))
    # Shares are added by each client, and units that change are found anew in every round.
    slow = target.shares or shaped(observe(few, few.silent_clients(start), start, 1).states)
    return parameters(SMALL if slow or target.rounds > VALUES // LARGE else LARGE)


def conformance(
    target: Target, start: Parameters, seed: int, *, deep: bool = False
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
    target = target.with_rounds(min(target.rounds, MOST_ROUNDS))
    runs = [observe(target, target.silent_clients(start), start, seed + k) for k in range(RUNS)]
    if isinstance(runs[0].error, FedsimError):
        raise runs[0].error
    units, steps = (
        np.stack(both)
        for both in zip(*(in_units(seen, target, start) for seen in runs), strict=True)
    )
    layers = columns(start)
    noise = MeasuredNoise.of(units, target, start)
    moving = _one_coordinate_each(target, start, seed)
    charges = charge_checks([*runs, moving], target.event)
    checks = [_presence(units)]
    if not checks[0].p_value:
        return [*checks, *charges], noise
    # Layers that have no noise at all are found by the size of the others.
    z = units / np.where(noise.stds > 0, noise.stds, np.median(noise.stds))
    checks += noise_checks(z, layers, np.stack([seen.sizes for seen in runs]))
    if noise.stds.all():
        checks += grid_checks(steps, layers)
    few = parameters(FEW_PARAMETERS)
    more = [
        observe(target, target.silent_clients(few), few, seed + RUNS + k) for k in range(MORE_DRAWS)
    ]
    small = np.concatenate([in_units(seen, target, few)[0] for seen in more])
    checks.append(covariance_check(small, columns(few)))
    checks += _sampled([seen.asked for seen in (*runs, *more)], target)
    checks += [
        _same_draws(runs[0], moving),
        _each_adds(runs[0], moving, noise),
        several_check(target, start, seed, runs[0], noise),
        *([] if target.shares else [failures_check(target, seed)]),
        resume_check(target, start, seed, runs[0]),
        *system_checks(target, deep=deep),
        *charges,
    ]
    return checks, noise


def _one_coordinate_each(target: Target, start: Parameters, seed: int) -> Observation:
    """Clients that each move a coordinate of their own, as far as there are so many."""
    layout = Layout.of(start)
    loud = min(target.population, layout.d)
    clients = one_coordinate_each(loud, layout.d, reach(target.mechanism, layout), target.sides)
    return observe(target, clients.changed(silent=target.population - loud), start, seed)


def _sampled(asked: Sequence[Sequence[npt.NDArray[np.int64]]], target: Target) -> list[Check]:
    cohort = target.settings.cohort
    if isinstance(cohort, InclusionSampler):
        chances = np.stack([cohort.probabilities(t) for t in range(1, target.rounds + 1)])
        return inclusion_checks(asked, chances, target.event)
    return draw_checks(asked, target.event, target.population)


def _presence(units: Floats) -> Check:
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
    pairs = enumerate(zip(nobody.asked, moving.asked, strict=True), 1)
    other = (
        n for n, (before, after) in pairs if not np.array_equal(np.sort(before), np.sort(after))
    )
    first = next(other, None)
    return invariant(
        "sampler", "draws and data", f"{len(nobody.asked)} rounds of one seed, twice",
        f"others were asked in round {first} when clients sent something else" if first else None,
        "the same clients whatever they send",
    )  # fmt: skip


def _each_adds(nobody: Observation, moving: Observation, noise: MeasuredNoise) -> Check:
    """Each client's own coordinate holds what it added: nothing, or one row, never more."""
    rounds = 1 if shaped(moving.states) else len(moving.moves)
    population = noise.target.population
    added = _Added(noise, population - min(population, nobody.moves.shape[1]))
    for index in range(rounds):
        added.compare(nobody, moving, index)
    return added.check(
        "what each client adds", f"{rounds} rounds, each client on its own coordinate"
    )


class _Added:
    """The most that clients added to their own coordinates, in standard deviations of noise."""

    def __init__(self, noise: MeasuredNoise, silent: int = 0) -> None:
        self._noise, self._silent = noise, silent
        self._most, self._whose = 0.0, "nobody"
        self._strangers: tuple[float, int] = (0.0, 0)

    def compare(self, nobody: Observation, moving: Observation, index: int, turn: int = 0) -> None:
        """Compare a round of two runs of one seed."""
        # In a state that moves on, equal draws have different sizes: units set them right.
        quiet, loud = (self._noise.of_round(seen, index) for seen in (nobody, moving))
        added = np.abs(moving.moves[index] / loud - nobody.moves[index] / quiet)
        asked = np.zeros(len(added), dtype=np.bool_)
        ids = moving.asked[index] - self._silent
        asked[ids[(ids >= 0) & (ids < len(added))]] = True
        number = index + 1 + turn
        self._strangers = max(self._strangers, (float(added[~asked].max(initial=0.0)), number))
        if not added.max() <= self._most:
            self._most = float(added.max())
            self._whose = f"client {int(added.argmax()) + self._silent} in round {number}"

    def check(self, name: str, looked: str) -> Check:
        """Against what the event allows."""
        allowed = 1 / self._noise.target.event.total_noise_multiplier
        moved, number = self._strangers
        if moved > 1e-3 * allowed:
            broken = f"somebody who was not asked in round {number} moved the model"
            return invariant("bound", name, looked, broken, "nobody who is not asked does")
        return size_check(name, looked, self._most, allowed, self._noise, self._whose)


def several_check(
    target: Target, start: Parameters, seed: int, nobody: Observation, noise: MeasuredNoise
) -> Check:
    """Several canaries at once, of many lengths, against a run of the same seed without any."""
    layout, mechanism = Layout.of(start), target.mechanism
    half = Scale.of(mechanism, mechanism.init(layout), layout).half
    rounds, turns = target.rounds, [0]
    if shaped(nobody.states) or target.adapts(start):
        # Later rounds depend on what was released before: the first one, again and again.
        rounds, turns = 1, list(range(ROUNDS_FAILING))
    added = _Added(noise)
    for turn in turns:
        clients = several_canaries(target.population, half, target.sides, turn)
        seen = observe(target.with_rounds(rounds), clients, start, seed)
        for index in range(rounds):
            added.compare(nobody, seen, index, turn)
    looked = f"{rounds * len(turns)} rounds of 1 to all clients at once, of .5 to 5 C"
    return added.check("what several clients add", looked)


def failures_check(target: Target, seed: int) -> Check:
    """However many fail, and in whatever way, what is released is the same."""
    few, rounds = parameters(FEW_PARAMETERS), min(ROUNDS_FAILING, target.rounds)
    target = target.with_rounds(rounds)
    runs = {
        failure: observe(
            target, failing_clients(target.population, FEW_PARAMETERS, target.sides, row), few, seed
        )
        for failure, row in {
            "raises": None,
            "sends NaN": np.nan,
            "sends an infinity": np.inf,
        }.items()
    }
    if not target.adapts(few) and not target.sides:
        # There a client that sends zeros adds what one that fails does.
        runs["sends zeros"] = observe(target, target.silent_clients(few), few, seed)
    (first, reference), *others = runs.items()
    broken = None if reference.released == rounds else f"{reference.released} of {rounds} rounds"
    for failure, seen in others:
        differ = np.flatnonzero((seen.moves != reference.moves).any(1))
        if len(differ) and broken is None:
            broken = (
                f"round {differ[0] + 1} differs between several clients of which each {first} and "
                f"as many of which each {failure}"
            )
    return invariant(
        "plan", "several fail at once", f"{rounds} rounds, each in {len(runs)} ways", broken,
        "every round released, and the same",
    )  # fmt: skip


def resume_check(target: Target, start: Parameters, seed: int, whole: Observation) -> Check:
    """A run that is stopped and resumed releases what it would have, and draws nothing again."""
    rounds = min(RESUMED, target.rounds)
    looked = f"{rounds} rounds, stopped after {rounds // 2}"
    if rounds < 2:
        return invariant("noise", "resume", looked, None, "too few rounds to stop in between")
    few = target.with_rounds(rounds)
    moves, entries = observe_resumed(few, few.silent_clients(start), start, seed, rounds // 2)
    lines, differ = [entry.round for entry in entries], (moves != whole.moves[:rounds]).any(1)
    broken = None
    if differ.any():
        broken = f"round {int(differ.argmax()) + 1} of the resumed run differs"
    elif lines != list(range(1, rounds + 1)):
        broken = f"the ledger has lines for rounds {lines}"
    return invariant("noise", "resume", looked, broken, "the same rounds as without a stop")


def system_checks(target: Target, *, deep: bool) -> list[Check]:
    """With entropy from the system no two rounds have noise, or a cohort, in common."""
    total = DEEP_SYSTEM_ROUNDS if deep else SYSTEM_ROUNDS
    target = target.with_rounds(min(target.rounds, MOST_ROUNDS))
    few = parameters(FEW_PARAMETERS)
    runs = [
        observe(target, target.silent_clients(few), few, None)
        for _ in range(max(2, -(-total // target.rounds)))
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
    return [noise, _system_cohorts(target, runs, check.looked_at)]


def _system_cohorts(target: Target, runs: Sequence[Observation], looked: str) -> Check:
    """Nor are the same clients sampled again, where that many could be."""
    asked = [np.sort(ids).tobytes() for seen in runs for ids in seen.asked]
    population, q = target.population, target.denominator / target.population
    # Two cohorts are equal with this probability, at most, if they are independent.
    log_p = population * np.log(q * q + (1 - q) ** 2) + np.log(population)
    again = len(asked) - len(set(asked))
    unlikely = log_p + 2 * np.log(max(len(asked), 2)) < np.log(1e-12)
    return invariant(
        "sampler", "samples of the system's", looked,
        f"{again} cohorts were sampled before" if again and unlikely else None,
        "no cohort is sampled again" if unlikely else "too few clients to tell",
    )  # fmt: skip


def unrelated_noise_check(target: Target, rival: Target, seed: int) -> Check:
    """Two runs of one seed that are not the same run: their noise may have nothing in common.

    Else the difference of what they released shows sums without noise.
    """
    start = parameters(SMALL)
    rows = []
    for contender in (target, rival):
        few = contender.with_rounds(min(FEW, contender.rounds))
        moves = observe(few, few.silent_clients(start), start, seed).moves
        # In units of its own first standard deviation, whatever that is.
        norms = np.maximum(np.sqrt(np.square(moves).mean(1, keepdims=True)), 1e-300)
        rows.append(moves / norms)
    looked = f"{len(rows[0])} rounds each of two runs of one seed, at other noise multipliers"
    return pairs_of_rounds(np.concatenate(rows), looked, "noise of another run")

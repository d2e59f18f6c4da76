"""Whole runs of clients that send zeros: releases are noise, cohorts follow the sampler's law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsim.audit.adversarial_clients import failing_clients, several_canaries
from fedsim.audit.checks import Check, Floats, Ids, invariant
from fedsim.audit.ledger_checks import charge_checks
from fedsim.audit.noise_checks import (
    covariance_check,
    grid_checks,
    noise_checks,
    pairs_of_rounds,
    repeats,
)
from fedsim.audit.noise_scale import MeasuredNoise, Scale, in_units, length_check, shaped
from fedsim.audit.observation import Observation, Target, observe, parameters
from fedsim.audit.sampling_checks import declared_law_check, draw_checks, inclusion_checks
from fedsim.audit.worlds import one_coordinate_each, reach
from fedsim.cohorts import InclusionSampler
from fedsim.errors import FedsimError
from fedsim.privacy.plan import of_user

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


def with_whole_model(target: Target) -> Target:
    """With as many parameters as whole runs can afford: more show more of the noise."""
    target = target.at_most(MOST_ROUNDS).with_model(parameters(64))
    states = observe(target.at_most(FEW), target.silent_clients(), 1).states
    # Each client adds shares, and units that change are computed in every round.
    slow = target.shares or shaped(states)
    size = SMALL if slow or target.rounds > VALUES // LARGE else LARGE
    return target.with_model(parameters(size))


def conformance(
    target: Target, seed: int, *, deep: bool = False
) -> tuple[list[Check], MeasuredNoise]:
    """Every test of whole runs, and how large the noise is.

    Two runs of different seeds show their noise and cohorts, and some of a smaller model more
    cohorts; others have the first one's seed and clients that each move a coordinate of their own,
    so that the difference of the releases is what each of them added.

    Parameters
    ----------
    target : Target
        See `with_whole_model`.
    deep : bool
        Whether to test many more releases with entropy from the system.
    """
    runs = [observe(target, target.silent_clients(), seed + k) for k in range(RUNS)]
    if isinstance(runs[0].error, FedsimError):
        raise runs[0].error
    units, steps = (
        np.stack(both) for both in zip(*(in_units(seen, target) for seen in runs), strict=True)
    )
    layers = list(target.layers.values())
    noise = MeasuredNoise.of(units, layers)
    moving = _one_coordinate_each(target, seed)
    charges = charge_checks([*runs, moving], target.event)
    checks = [_presence(units)]
    if not checks[0].p_value:
        return [*checks, *charges], noise
    # Layers that have no noise at all are found by the size of the others.
    z = units / np.where(noise.stds > 0, noise.stds, np.median(noise.stds))
    checks += noise_checks(z, layers, np.stack([seen.sizes for seen in runs]))
    if noise.stds.all():
        checks += grid_checks(steps, layers)
    few = target.with_model(parameters(FEW_PARAMETERS))
    more = [observe(few, few.silent_clients(), seed + RUNS + k) for k in range(MORE_DRAWS)]
    small = np.concatenate([in_units(seen, few)[0] for seen in more])
    checks.append(covariance_check(small, list(few.layers.values())))
    checks += _sampled([seen.asked for seen in (*runs, *more)], target, seed)
    checks += [
        _same_draws(runs[0], moving),
        _each_adds(target, runs[0], moving, noise),
        several_check(target, seed, runs[0], noise),
        *([] if target.shares else [failures_check(target, seed)]),
        resume_check(target, seed, runs[0]),
        *system_checks(target, deep=deep),
        *charges,
    ]
    return checks, noise


def _one_coordinate_each(target: Target, seed: int) -> Observation:
    """Clients that each move a coordinate of their own, as far as there are so many."""
    loud = min(target.population, target.layout.d)
    scale = reach(target.mechanism, target.layout)
    clients = one_coordinate_each(loud, target.layout.d, scale, target.sides)
    return observe(target, clients.changed(silent=target.population - loud), seed)


def _sampled(asked: Sequence[Sequence[Ids]], target: Target, seed: int) -> list[Check]:
    cohort = target.settings.cohort
    if isinstance(cohort, InclusionSampler):
        chances = np.stack([cohort.probabilities(t) for t in range(1, target.rounds + 1)])
        return inclusion_checks(asked, chances, target.event)
    checks = draw_checks(asked, target.event, target.population)
    if of_user(cohort):
        checks.append(declared_law_check(cohort, target.event, target.rounds, seed))
    return checks


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
    first = next((n for n, (a, b) in pairs if not np.array_equal(np.sort(a), np.sort(b))), None)
    return invariant(
        "sampler", "draws and data", f"{len(nobody.asked)} rounds of one seed, twice",
        f"other clients in round {first} when clients sent something else" if first else None,
        "the same clients whatever they send",
    )  # fmt: skip


def _each_adds(
    target: Target, nobody: Observation, moving: Observation, noise: MeasuredNoise
) -> Check:
    """Each client's own coordinate holds what it added: nothing, or one row, never more."""
    rounds = 1 if shaped(moving.states) else len(moving.moves)
    added = _Added(target, noise, target.population - min(target.population, target.layout.d))
    for index in range(rounds):
        added.compare(nobody, moving, index)
    return added.check(
        "what each client adds", f"{rounds} rounds, each client on its own coordinate"
    )


class _Added:
    """The most that clients added to their own coordinates, in standard deviations of noise."""

    def __init__(self, target: Target, noise: MeasuredNoise, silent: int = 0) -> None:
        self._target, self._noise, self._silent = target, noise, silent
        self._most, self._whose = 0.0, "no client"
        self._not_sampled: tuple[float, int] = (0.0, 0)

    def compare(self, nobody: Observation, moving: Observation, index: int, turn: int = 0) -> None:
        """Compare a round of two runs of one seed."""
        # A bound that adapts scales equal noise differently in the two runs: each has its unit.
        quiet, loud = (
            seen.moves[index] / self._noise.of_round(seen, index, self._target)
            for seen in (nobody, moving)
        )
        added = np.abs(loud - quiet)
        asked = np.zeros(len(added), dtype=np.bool_)
        ids = moving.asked[index] - self._silent
        asked[ids[(ids >= 0) & (ids < len(added))]] = True
        number = index + 1 + turn
        outside = float(added[~asked].max(initial=0.0))
        self._not_sampled = max(self._not_sampled, (outside, number))
        if not added.max() <= self._most:
            self._most = float(added.max())
            self._whose = f"client {int(added.argmax()) + self._silent} in round {number}"

    def check(self, name: str, looked: str) -> Check:
        """Against one bounded row."""
        allowed = 1 / self._target.event.total_noise_multiplier
        moved, number = self._not_sampled
        if moved > 1e-3 * allowed:
            broken = f"a client that was not sampled in round {number} moved the model"
            return invariant("bound", name, looked, broken, "only sampled clients do")
        return length_check(name, looked, self._most, self._whose, allowed, self._noise)


def several_check(target: Target, seed: int, nobody: Observation, noise: MeasuredNoise) -> Check:
    """Several canaries at once, of many lengths, against a run of the same seed without any."""
    mechanism, layout = target.mechanism, target.layout
    half = Scale.of(mechanism, mechanism.init(layout), layout).half
    rounds, turns = target.rounds, [0]
    if shaped(nobody.states) or target.adapts:
        # Later rounds depend on earlier releases: the first one is made several times.
        rounds, turns = 1, list(range(ROUNDS_FAILING))
    added = _Added(target, noise)
    for turn in turns:
        clients = several_canaries(target.population, half, target.sides, turn)
        seen = observe(target.with_rounds(rounds), clients, seed)
        for index in range(rounds):
            added.compare(nobody, seen, index, turn)
    looked = f"{rounds * len(turns)} rounds of 1 to all clients at once, of .5 to 5 C"
    return added.check("what several clients add", looked)


def failures_check(target: Target, seed: int) -> Check:
    """However many clients fail, and in whatever way, the release is the same."""
    target = target.at_most(ROUNDS_FAILING).with_model(parameters(FEW_PARAMETERS))
    population, sides, rounds = target.population, target.sides, target.rounds
    ways = {"raises": None, "sends NaN": np.nan, "sends an infinity": np.inf}
    runs = {
        way: observe(target, failing_clients(population, FEW_PARAMETERS, sides, row), seed)
        for way, row in ways.items()
    }
    if not target.adapts and not sides:
        # Then a client that sends zeros adds what one that fails does.
        runs["sends zeros"] = observe(target, target.silent_clients(), seed)
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


def resume_check(target: Target, seed: int, whole: Observation) -> Check:
    """A run that is stopped and resumed releases what it would have, and draws nothing again."""
    few = target.at_most(RESUMED)
    looked = f"{few.rounds} rounds, stopped after {few.rounds // 2}"
    if few.rounds < 2:
        return invariant("noise", "resume", looked, None, "too few rounds to stop in between")
    seen = observe(few, few.silent_clients(), seed, resume_after=few.rounds // 2)
    if seen.error is not None:
        raise seen.error
    lines = [entry.round for entry in seen.entries]
    differ = (seen.moves != whole.moves[: few.rounds]).any(1)
    broken = None
    if differ.any():
        broken = f"round {int(differ.argmax()) + 1} of the resumed run differs"
    elif lines != list(range(1, few.rounds + 1)):
        broken = f"the ledger has lines for rounds {lines}"
    return invariant("noise", "resume", looked, broken, "the same rounds as without a stop")


def system_checks(target: Target, *, deep: bool) -> list[Check]:
    """With entropy from the system no two rounds have noise, or a cohort, in common."""
    total = DEEP_SYSTEM_ROUNDS if deep else SYSTEM_ROUNDS
    target = target.at_most(MOST_ROUNDS).with_model(parameters(FEW_PARAMETERS))
    runs = [
        observe(target, target.silent_clients(), None)
        for _ in range(max(2, -(-total // target.rounds)))
    ]
    moves = np.concatenate([seen.moves for seen in runs])
    check = repeats(moves, f"{len(moves):,} rounds of {len(runs)} runs")
    entropies = {entry.entropy for seen in runs for entry in seen.entries}
    broken = check.measured if not check.p_value else None
    if entropies != {"system"}:
        broken = f"the ledger says entropy {' and '.join(sorted(entropies))}"
    looked, expected = check.looked_at, "never the same, and recorded as the system's"
    noise = invariant("noise", "noise with system entropy", looked, broken, expected)
    return [noise, _system_cohorts(target, runs, looked)]


def _system_cohorts(target: Target, runs: Sequence[Observation], looked: str) -> Check:
    """Nor is a cohort sampled twice, where the population is large enough to tell."""
    asked = [np.sort(ids).tobytes() for seen in runs for ids in seen.asked]
    population, q = target.population, target.denominator / target.population
    # Independent cohorts are equal with this probability at most: each client is in both or in
    # neither. Only where no two of so many can be expected to be equal is one a violation.
    log_p = population * np.log(q * q + (1 - q) ** 2) + np.log(population)
    again = len(asked) - len(set(asked))
    unlikely = log_p + 2 * np.log(max(len(asked), 2)) < np.log(1e-12)
    return invariant(
        "sampler", "cohorts with system entropy", looked,
        f"{again} cohorts were sampled before" if again and unlikely else None,
        "no cohort is sampled again" if unlikely else "too few clients to tell",
    )  # fmt: skip


def unrelated_noise_check(target: Target, rival: Target, seed: int) -> Check:
    """Two runs of one seed and different configs: their noise may have nothing in common.

    Otherwise the difference of their releases shows sums without noise.
    """
    rows = []
    for contender in (target, rival):
        few = contender.at_most(FEW).with_model(parameters(SMALL))
        moves = observe(few, few.silent_clients(), seed).moves
        # In units of each round's own standard deviation, whatever that is.
        norms = np.maximum(np.sqrt(np.square(moves).mean(1, keepdims=True)), 1e-300)
        rows.append(moves / norms)
    looked = f"{len(rows[0])} rounds each of two runs of one seed, at two noise multipliers"
    return pairs_of_rounds(np.concatenate(rows), looked, "noise of another run")

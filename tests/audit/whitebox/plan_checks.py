"""Checks of the plan: only the noisy sum may depend on what clients send, and no draw may repeat.

All other outputs (metrics, information about a release, state, what clients are sent next) are
tested in three ways. Federations with different rows but equal bounded sums must give the same
number. A number without noise must not change with a canary. A number that is a function of the
released parameters if all clients send zeros must be the same function with a canary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from whitebox.bound_checks import allowed_length
from whitebox.clients import ALONE, OPPOSED, equal_sums, longest_row
from whitebox.target import Observation, StrategyTarget, Target, parameters

from fedsim.array_types import Floats, Ints
from fedsim.audit.findings import Finding, invariant, untested
from fedsim.audit.noise_checks import pairs, repeats
from fedsim.audit.sampling_checks import Sampled
from fedsim.privacy import Entry
from fedsim.privacy.laws import Participation
from fedsim.randomness import Address

SEEDS = 96
MIN_DIFFERENCE = 1e-12
FUNCTION_RESIDUAL = 1e-8
"""A number whose residuals are at most this part of its spread is a function of the release."""
FUNCTION_BROKEN = 1e-5
MAX_STDS_OFF = 12.0
"""How far, in residual stds, a number that nearly follows from the release may be off."""
MAX_NUMBERS = 512
NOISY = ("info.", "state.mechanism", "sent.")
"""Prefixes of numbers that may depend on released scalars, or nonlinearly on the parameters."""


@dataclass(frozen=True)
class NoiseOnly:
    """Runs with many seeds in which all clients send zeros, with few parameters, and their outputs.

    Attributes
    ----------
    target : Target
        The target, with one parameter in each layer.
    seed : int
        Seed of the first run, and of runs with a canary.
    runs : sequence of Observation
    """

    target: StrategyTarget
    seed: int
    runs: Sequence[Observation]

    @classmethod
    def of(cls, target: StrategyTarget, seed: int) -> NoiseOnly:
        """Make the runs."""
        small = target.with_model({name: tensor[:1] for name, tensor in target.start.items()})
        clients = small.silent_clients()
        seeds = range(seed, seed + SEEDS)
        return cls(small, seed, [small.observe(clients, s, outputs=True) for s in seeds])

    def stds(self, index: int) -> dict[str, float]:
        """Standard deviations of the numbers that the mechanism shows after round ``index + 1``.

        What the size of the cohort explains is removed, since zero rows may add to a number too.
        """
        statistics = [run.statistics[index] for run in self.runs if len(run.statistics) > index]
        if len(statistics) < len(self.runs) or not statistics[0]:
            return {}
        values = np.array([list(numbers.values()) for numbers in statistics])
        sizes = np.array([run.sizes[index] for run in self.runs])
        design = np.stack([np.ones(len(sizes)), sizes], 1)
        residuals = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
        stds = np.sqrt(np.square(residuals).sum(0) / (len(values) - 2))
        stds[np.ptp(values, axis=0) == 0] = 0.0
        return dict(zip(statistics[0], stds.tolist(), strict=True))


def participations(sampled: Sampled, plan: Participation) -> Finding:
    """Whether rows take part as rarely, and as far apart, as the plan's sensitivity assumes."""
    first, fault = 0, None
    for length in sampled.lengths:
        members = sampled.membership[first : first + length]
        first += length
        most = int(members.sum(0).max(initial=0))
        # Prefix sums, whose differences count a row's rounds within each window.
        inside = np.cumsum(np.concatenate([np.zeros((1, members.shape[1])), members]), axis=0)
        width = min(plan.separation, length)
        if (inside[width:] - inside[: len(inside) - width]).max(initial=0) > 1:
            fault = f"a client was sampled twice in {plan.separation} rounds"
        elif most > plan.participations:
            fault = f"a client was sampled in {most} rounds, of at most {plan.participations}"
    expected = f"at most {plan.participations} rounds, {plan.separation} apart"
    return invariant(sampled.examined, fault, expected)


def what_leaves(noise_only: NoiseOnly) -> Finding:
    """Whether all outputs of a round are functions of what was released.

    Parameters
    ----------
    noise_only : NoiseOnly
        Its runs have one round more than the first that samples the canary.
    """
    fault = _unprotected(noise_only) or _unexplained(noise_only)
    names = len(noise_only.runs[0].outputs[-1]) if noise_only.runs[0].outputs else 0
    examined = f"{names} numbers or arrays of {SEEDS} runs without and two with a canary"
    return invariant(examined, fault, "functions of the release")


def _unprotected(noise_only: NoiseOnly) -> str | None:
    """Name of a client metric in a round's outputs that no setting allows; None without."""
    if noise_only.target.template.shows_clients:
        return None
    names = (name for run in noise_only.runs for numbers in run.outputs for name in numbers)
    column = next((name for name in names if name.startswith(("metrics.", "evaluation."))), None)
    return column and f"{column} leaves a round whose metrics are not released"


def _unexplained(noise_only: NoiseOnly) -> str | None:
    target = noise_only.target
    reference = _table(noise_only.runs)
    if reference is None:
        return "the numbers that leave differ between rounds"
    names, values = reference
    # A linear regression over runs without a canary, on moves, their squares and norms, finds how
    # each number depends on the release. It is then constant, a function of the release (residuals
    # are rounding errors), or has noise of its own. A canary must change none of these relations.
    designs = np.stack([_design(run) for run in noise_only.runs])
    coefficients = np.linalg.lstsq(designs, values, rcond=None)[0]
    spread = values.std(0)
    freedom = len(values) - np.linalg.matrix_rank(designs)
    residuals = np.sqrt(np.square(values - designs @ coefficients).sum(0) / max(freedom, 1))
    # If a row may move a release by several stds, nonlinear numbers may be off by more.
    small = allowed_length(target.event) <= 1
    for world in (ALONE, OPPOSED):
        clients = target.world(world, neighbour="zero-out")
        run = target.observe(clients, noise_only.seed, outputs=True)
        table = _table([run])
        if table is None or table[0] != names:
            return "other numbers leave a round with a canary"
        measured, predicted = table[1][0], _design(run) @ coefficients
        for index, name in enumerate(names):
            size = 1 + abs(values[0, index])
            off = abs(measured[index] - predicted[index])
            if spread[index] <= MIN_DIFFERENCE * size:
                if abs(measured[index] - values[0, index]) > MIN_DIFFERENCE * size:
                    return f"{name} has no noise and moves with a canary"
            elif residuals[index] <= FUNCTION_RESIDUAL * spread[index]:
                if off > FUNCTION_BROKEN * (spread[index] + abs(measured[index])):
                    return f"{name} follows from the release only if all clients send zeros"
            elif small and off > MAX_STDS_OFF * residuals[index] and not name.startswith(NOISY):
                return f"{name} is {off / residuals[index]:.3g} std from what the release explains"
    return None


def _table(runs: Sequence[Observation]) -> tuple[list[str], Floats] | None:
    """Names and values ``[runs, numbers]`` after the last round; None if runs have other names."""
    rows: list[list[float]] = []
    names: list[str] = []
    for run in runs:
        if not run.outputs:
            return None
        flat = _flat(run.outputs[-1])
        if names and list(flat) != names:
            return None
        names = list(flat)
        rows.append(list(flat.values()))
    return names[:MAX_NUMBERS], np.array(rows)[:, :MAX_NUMBERS]


def _flat(numbers: Mapping[str, Floats]) -> dict[str, float]:
    return {
        f"{name}[{index}]" if len(entries) > 1 else name: float(entry)
        for name, entries in numbers.items()
        for index, entry in enumerate(entries)
    }


def _design(run: Observation) -> Floats:
    """Regressors for a number: released moves, their squares and norms, and cohort sizes."""
    moves = run.moves
    scale = np.maximum(np.linalg.norm(moves, axis=1), 1e-300)
    return np.concatenate([[1.0], run.sizes, moves.ravel(), np.square(moves).ravel(), scale])


def equal_sum_runs(target: StrategyTarget, seed: int) -> tuple[Observation, Observation]:
    """Runs of two federations with different rows whose bounded rows have the same sums."""
    target = target.with_model(parameters(64))
    bounded = longest_row(target.mechanism, target.layout)
    rows = torch.stack([4 * bounded, 16 * bounded])
    short, long = target.mechanism.bound(rows, layout=target.layout)
    longer = not target.adapts and torch.equal(short, long)
    first, second = equal_sums(target.population, bounded, target.sides, longer=longer)
    return target.observe(first, seed, outputs=True), target.observe(second, seed, outputs=True)


def nothing_but_sums(first: Observation, second: Observation) -> Finding:
    """Whether federations with the same bounded sums have the same outputs, bit for bit."""
    examined = f"{len(first.moves)} rounds of two federations with the same sums of other rows"
    fault = difference(first.outputs, second.outputs)
    if not np.array_equal(first.moves, second.moves):
        fault = "the released parameters differ"
    return invariant(examined, fault, "the same in all that leaves a round")


def difference(
    first: Sequence[Mapping[str, Floats]], second: Sequence[Mapping[str, Floats]]
) -> str | None:
    """First difference between the outputs of two runs, in words; None if they are equal."""
    for before, after in zip(first, second, strict=False):
        if before.keys() != after.keys():
            return "other numbers leave a round"
        for name in before:
            if not np.array_equal(before[name], after[name], equal_nan=True):
                return f"{name} differs"
    return None if len(first) == len(second) else "the runs end at other rounds"


def same_cohorts(nobody: Observation, moving: Observation) -> Finding:
    """Whether the sampled clients do not depend on what clients send."""
    first = _first_other_cohort(nobody, moving)
    fault = f"other clients in round {first} when clients sent something else" if first else None
    examined = f"{len(nobody.sampled)} rounds of one seed, twice"
    return invariant(examined, fault, "the same clients whatever they send")


def _first_other_cohort(run: Observation, reference: Observation) -> int | None:
    """First round, of those that both runs have, in which they sampled other clients."""
    pairs = enumerate(zip(run.sampled, reference.sampled, strict=False), 1)
    return next((n for n, (a, b) in pairs if not np.array_equal(np.sort(a), np.sort(b))), None)


def same_after_failures(moves: Mapping[str, Floats]) -> Finding:
    """Whether the release does not depend on the way in which several clients fail.

    Parameters
    ----------
    moves : mapping of str to float64 ``[rounds, d]``
        Releases by way of failing.
    """
    (first, reference), *others = moves.items()
    rounds, released = len(reference), int((reference != 0).any(1).sum())
    fault = None if released == rounds else f"{released} of {rounds} rounds"
    for failure, observed in others:
        differ = np.flatnonzero((observed != reference).any(1))
        if len(differ) and fault is None:
            fault = (
                f"round {differ[0] + 1} differs between several clients of which each {first} and "
                f"as many of which each {failure}"
            )
    examined = f"{rounds} rounds, each in {len(moves)} ways"
    return invariant(examined, fault, "every round released, and the same")


def same_after_resume(observed: Observation, whole: Observation) -> Finding:
    """Whether a run that is stopped and resumed makes the same releases, each charged once."""
    rounds = len(observed.moves)
    if observed is whole:
        return untested(f"{rounds} rounds", "too few rounds to stop in between")
    if observed.error is not None:
        # That a state cannot be resumed from reveals nothing of data.
        return untested(f"{rounds} rounds", f"the run cannot be resumed: {observed.error}")
    lines = [entry.round for entry in observed.entries]
    differ = (observed.moves != whole.moves[:rounds]).any(1)
    fault = None
    if differ.any():
        fault = f"round {int(differ.argmax()) + 1} of the resumed run differs"
    elif first := _first_other_cohort(observed, whole):
        fault = f"round {first} of the resumed run has another cohort"
    elif lines != list(range(1, rounds + 1)):
        fault = f"the ledger has lines for rounds {lines}"
    examined = f"{rounds} rounds, stopped after {rounds // 2}"
    return invariant(examined, fault, "the same rounds as without a stop")


def system_noise(values: Floats, examined: str, entropies: set[str]) -> Finding:
    """Whether noise with system entropy never repeats, and the ledger records that entropy."""
    again = repeats(values, examined)
    fault = None if again.p_value else again.measured
    if entropies != {"system"}:
        fault = f"the ledger says entropy {' and '.join(sorted(entropies))}"
    return invariant(examined, fault, "never the same, and recorded as the system's")


def system_cohorts(cohorts: Sequence[bytes], population: int, rate: float) -> Finding:
    """Whether no cohort with system entropy repeats, if the population is large enough to tell."""
    examined = f"{len(cohorts):,} rounds"
    # Upper bound on the log probability that two independent cohorts are equal (each client is in
    # both or in neither). A repeat is only a violation if none is expected among all pairs.
    log_p = population * np.log(rate * rate + (1 - rate) ** 2) + np.log(population)
    if log_p + 2 * np.log(max(len(cohorts), 2)) >= np.log(1e-12):
        return untested(examined, "too few clients to tell")
    again = len(cohorts) - len(set(cohorts))
    fault = f"{again} cohorts were sampled before" if again else None
    return invariant(examined, fault, "no cohort is sampled again")


def addresses_once(addresses: Sequence[Address], rounds: int) -> Finding:
    """Whether no address of random numbers is used twice."""
    twice = [address for address, times in Counter(addresses).items() if times > 1]
    fault = None
    if twice:
        first = twice[0]
        fault = (
            f"{len(twice)} twice, the first of {first.purpose.name.lower()} at {first.level} "
            f"level in round {first.round}"
        )
    examined = f"{len(addresses):,} addresses of {rounds} rounds"
    return invariant(examined, fault, "each used once")


@dataclass(frozen=True)
class ExampleRun:
    """Releases of clients' local training.

    Attributes
    ----------
    releases : float64 ``[clients, rounds, steps, d]``
        Noisy mean gradients.
    entries : sequence of tuple of Entry
        Lines of each client's ledger.
    reports : sequence of mapping of name to float64 ``[clients]``
        What clients report after each round in addition to updates, and whether they failed.
    """

    releases: Floats
    entries: Sequence[tuple[Entry, ...]]
    reports: Sequence[Mapping[str, Floats]]


def noise_of_clients(target: Target, run: ExampleRun) -> Finding:
    """Whether clients' noise is independent."""
    clients, width = len(run.releases), run.releases.shape[-1]
    examined = f"{clients} clients of one run"
    if target.adapts:
        return untested(examined, "noise that adapts has no known distribution")
    releases = run.releases.reshape(clients, -1, width)
    noise = np.stack([target.whitened(rows) for rows in releases])
    noise /= np.maximum(np.sqrt(np.square(noise).mean((0, 1))), 1e-300)  # layers may differ
    return pairs(noise.reshape(clients, -1), examined)


def line_for_every_round(target: Target, run: ExampleRun) -> Finding:
    """Whether each round has one line with the plan's event, which covers all its steps."""
    fault, rounds = None, run.releases.shape[1]
    for client, entries in enumerate(run.entries):
        lines = [entry.round for entry in entries]
        if lines != list(range(1, rounds + 1)):
            fault = f"client {client} has lines for rounds {lines}"
        elif any(entry.event != target.event for entry in entries):
            fault = f"client {client}'s lines do not say what a round costs"
    steps = int((run.releases != 0).any(-1).sum(-1).max(initial=0))
    if target.plan.sampler.gaussians(steps) > target.event.count:
        fault = f"{steps} gradients a round were released, {target.event.count} are charged"
    examined = f"{rounds} rounds of {len(run.entries)} clients"
    return invariant(examined, fault, "one a client, for all its gradients")


def passes(target: Target, length: int, draws: Sequence[Sequence[Ints]]) -> Finding:
    """Whether each example is in one batch of a pass.

    Parameters
    ----------
    length : int
        Number of batches of a pass.
    draws : sequence of sequences of int64 arrays
        Batches of each client in all rounds.
    """
    fault, size, whole = None, target.population, len(draws[0]) // target.rounds
    # Rounds that end within a pass are not checked: the pass is then charged as a whole.
    if not target.adapts and whole % length == 0:
        for client in draws:
            for first in range(0, len(client) - len(client) % length, length):
                ids = np.concatenate(client[first : first + length])
                if np.bincount(ids, minlength=size).max() > 1:
                    fault = "an example was in two batches of one pass"
    examined = f"{len(draws)} clients of {size} examples, {len(draws[0])} batches each"
    return invariant(examined, fault, "each example once a pass")

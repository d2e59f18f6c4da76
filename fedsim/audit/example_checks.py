"""Example level, through the trainer: noise, batches, what one example moves, worlds, charges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.audit.adversarial_clients import LENGTHS, NUMBERS
from fedsim.audit.checks import Check, Floats, Ids, invariant, statistical
from fedsim.audit.claim import Claim
from fedsim.audit.example_runs import D, ExamplePlan, ExampleRun, observe_examples
from fedsim.audit.ledger_checks import (
    AFFORDABLE,
    accounting_check,
    budget_between,
    budget_check,
    missed_statistic,
)
from fedsim.audit.noise_checks import grid_checks, noise_checks, repeats
from fedsim.audit.noise_scale import MeasuredNoise, length_check
from fedsim.audit.sampling_checks import draw_checks
from fedsim.audit.two_world import distinguish

CLIENTS = 2
RELEASES = 100
FEW = 12
FAINT = 1e-3
"""A noise multiplier so small that a release shows which examples were in it."""
RISK = 1e-3
MANY, SYSTEM_RELEASES = 256, 1024


def example_checks(plan: ExamplePlan, rounds: int, runs: int, seed: int) -> list[Check]:
    """Every test of clients of one size.

    Parameters
    ----------
    rounds : int
        Of the run that is audited.
    runs : int
        Clients without the canary, and as many with it, that are two worlds.
    """
    checks, noise = _noise(plan, seed)
    checks += _batches(plan, seed)
    if noise is not None:
        checks += _what_one_moves(plan, noise, seed)
    checks += [*_several(plan, seed), _system(plan), _budget(plan, seed)]
    claim = Claim((plan.event.times(rounds),), plan.privacy.delta)
    checks += [_worlds(plan, rounds, runs, seed), accounting_check(claim, seed)]
    return [replace(check, name=f"{check.name}, examples") for check in checks]


def _zeros(plan: ExamplePlan, clients: int) -> Tensor:
    return torch.zeros(clients, plan.size, plan.d, dtype=torch.float64)


def _noise(plan: ExamplePlan, seed: int) -> tuple[list[Check], MeasuredNoise | None]:
    """Examples whose gradients are zero: releases are noise; and how large it is."""
    rounds = plan.rounds_of(RELEASES)
    run = observe_examples(plan, _zeros(plan, CLIENTS), rounds, seed)
    silent = (run.known == 0).all(-1)
    looked = f"{CLIENTS} clients of {plan.size} examples, {run.known.shape[1]} gradients each"
    broken = f"{int(silent.sum())} gradients without noise" if silent.any() else None
    checks = [
        _charges(plan, run, rounds),
        invariant("noise", "presence", looked, broken, "noise in every gradient"),
    ]
    if broken:
        return checks, None
    scale = plan.scale
    # Where a zero row is moved to the center, how many there were is not known here.
    units = (run.known - scale.center) * plan.denominator / scale.half
    noise = MeasuredNoise.of(units, plan.columns)
    if not np.abs(scale.zero).any():
        checks += noise_checks(units / noise.stds, plan.columns)
        checks += grid_checks(scale.steps(run.known, plan.denominator), plan.columns)
    return checks, noise


def _charges(plan: ExamplePlan, run: ExampleRun, rounds: int) -> Check:
    """One line a round, with the plan's event, and no more steps than it counts."""
    broken = None
    for client, entries in enumerate(run.entries):
        lines = [entry.round for entry in entries]
        if lines != list(range(1, rounds + 1)):
            broken = f"client {client} has lines for rounds {lines}"
        elif any(entry.event != plan.event for entry in entries):
            broken = f"client {client}'s lines do not say what a round costs"
    steps = int((run.releases != 0).any(-1).sum(-1).max(initial=0))
    if plan.release_plan.sampler.gaussians(steps) > plan.event.count:
        broken = f"{steps} gradients a round were released, {plan.event.count} are charged"
    return invariant(
        "ledger", "a line for every round", f"{rounds} rounds of {len(run.entries)} clients",
        broken, "one a client, for all its gradients",
    )  # fmt: skip


def _added(plan: ExamplePlan, rows: Tensor, rounds: int, seed: int) -> Floats:
    """What each example adds on its own coordinate, in bounds: ``[clients, releases, size]``.

    Under hardly any noise a release shows which examples were in it.
    """
    run = observe_examples(plan.with_noise(FAINT), rows, rounds, seed)
    added = (run.known - plan.scale.center) * plan.denominator / plan.scale.half
    return np.asarray(added[..., : plan.size])


def _bound_check(plan: ExamplePlan, added: Floats, name: str, looked: str, expected: str) -> Check:
    most = float(added.max())
    spare = 10 * FAINT * (D if plan.adapts else 1)
    broken = None if most <= 1 + spare else f"{most:.4g} times its bound"
    return invariant("bound", name, looked, broken, expected)


def _batches(plan: ExamplePlan, seed: int) -> list[Check]:
    """Each example moves a coordinate of its own: what it adds, and which batches it is in."""
    plan = replace(plan, d=max(plan.size, 8))
    rows = _zeros(plan, CLIENTS)
    rows[:, torch.arange(plan.size), torch.arange(plan.size)] = plan.longest
    added = _added(plan, rows, plan.rounds_of(RELEASES), seed)
    looked = f"{CLIENTS} clients of {plan.size} examples, {added.shape[1]} batches each"
    checks = [_bound_check(plan, added, "what each example adds", looked, "its bound at most")]
    draws = [[np.flatnonzero(row > 0.5) for row in client] for client in added]
    if plan.adapts and np.abs(plan.scale.zero).any():
        return checks
    if plan.event.law.inclusion(plan.size) is None:
        return [*checks, _passes(plan, draws, looked)]
    return [*checks, *draw_checks(draws, plan.event, plan.size, "examples")]


def _passes(plan: ExamplePlan, draws: list[list[Ids]], looked: str) -> Check:
    """In every pass each example is in one batch."""
    broken = None
    length = -(-plan.size // plan.work.batch_of(plan.size))
    # A round may end within a pass; a pass that begins in it is then charged whole.
    if not plan.adapts and plan.steps % length == 0:
        for client in draws:
            for first in range(0, len(client) - len(client) % length, length):
                ids = np.concatenate(client[first : first + length])
                if np.bincount(ids, minlength=plan.size).max() > 1:
                    broken = "an example was in two batches of one pass"
    return invariant("sampler", "passes", looked, broken, "each example once a pass")


def _several(plan: ExamplePlan, seed: int) -> list[Check]:
    """Several examples of many lengths at once, and several that are not finite."""
    plan = replace(plan, d=max(plan.size, 8))
    rows = _zeros(plan, len(NUMBERS))
    not_finite = rows.clone()
    for client, number in enumerate(NUMBERS):
        for example in range(min(number, plan.size)):
            length = LENGTHS[(7 * example + client) % len(LENGTHS)]
            rows[client, example, example] = length * float(plan.scale.half[example])
            not_finite[client, example] = torch.nan
    rounds = 1 if plan.adapts else plan.rounds_of(FEW)
    added = _added(plan, rows, rounds, seed)
    looked = f"{len(NUMBERS)} clients, of .5 to 5 C, {added.shape[1]} batches each"
    checks = [_bound_check(plan, added, "what several examples add", looked, "its bound at most")]
    if plan.adapts:
        return checks
    zeros, failed = (
        observe_examples(plan, examples, rounds, seed).releases
        for examples in (torch.zeros_like(rows), not_finite)
    )
    broken = None if np.array_equal(zeros, failed) else "gradients differ from those of zeros"
    looked = f"{len(NUMBERS)} clients of 1 to all examples that are NaN"
    return [
        *checks,
        invariant("plan", "several fail at once", looked, broken, "as if their gradients were 0"),
    ]


def _system(plan: ExamplePlan) -> Check:
    """With entropy from the system no two clients and rounds have noise in common."""
    plan = replace(plan, d=8)
    rounds = max(1, -(-SYSTEM_RELEASES // (MANY * plan.steps)))
    run = observe_examples(plan, _zeros(plan, MANY), rounds, None)
    releases = run.releases.reshape(-1, plan.d)
    releases = releases[(releases != 0).any(1)]
    check = repeats(releases, f"{len(releases):,} gradients of {MANY} clients")
    return replace(check, name="noise with system entropy")


def _budget(plan: ExamplePlan, seed: int) -> Check:
    """Clients stop where their budgets are spent."""
    budget = budget_between(plan.event, plan.privacy.delta)
    limited = replace(plan, privacy=replace(plan.privacy, max_epsilon=budget), d=8)
    run = observe_examples(limited, _zeros(limited, CLIENTS), AFFORDABLE + 3, seed)
    rounds = (run.releases != 0).any((2, 3)).sum(1)
    released = {f"client {client}": int(number) for client, number in enumerate(rounds)}
    return budget_check(released, f"{AFFORDABLE + 3} rounds at a budget of epsilon {budget:.4g}")


def _what_one_moves(plan: ExamplePlan, noise: MeasuredNoise, seed: int) -> list[Check]:
    """With and without one example, all else equal, at the worst rows there are."""
    names, canaries = zip(*_canaries(plan).items(), strict=True)
    without = _zeros(plan, len(names)) - plan.longest
    without[:, 0] = 0
    present = without.clone()
    present[:, 0] = torch.stack(canaries)
    # Long enough for each client's canary to be in several of its batches.
    steps = 1 if plan.adapts else plan.steps
    rounds = max(1, -(-4 * plan.size // int(plan.denominator * steps)))
    absent, seen = (observe_examples(plan, rows, rounds, seed) for rows in (without, present))
    std = noise.stds * plan.scale.half / plan.denominator
    lengths = np.linalg.norm((seen.known - absent.known) / std, axis=2).max(1)
    finite = np.isfinite(lengths)
    looked = f"{len(names)} clients of {plan.size} examples"
    checks = [_reports(plan, absent, seen, looked)]
    name = "what one example moves"
    if not finite.all():
        broken = f"an example that {names[int(finite.argmin())]} makes a gradient not finite"
        return [*checks, invariant("bound", name, looked, broken, "finite gradients")]
    longest = int(lengths.argmax())
    allowed = 1 / plan.event.total_noise_multiplier
    whose = f"by one that {names[longest]}"
    return [*checks, length_check(name, looked, float(lengths[longest]), whose, allowed, noise)]


def _reports(plan: ExamplePlan, without: ExampleRun, present: ExampleRun, looked: str) -> Check:
    """What clients report beside their updates does not depend on an example."""
    broken = None
    if not plan.privacy.unprotected_metrics:
        for before, after in zip(without.reports, present.reports, strict=True):
            moved = [n for n in before if not np.array_equal(before[n], after.get(n, np.zeros(0)))]
            if moved or before.keys() != after.keys():
                broken = f"{', '.join(moved) or 'its names'} differs"
    return invariant(
        "plan", "what else leaves a round", looked, broken, "the same whatever an example is"
    )


def _canaries(plan: ExamplePlan) -> dict[str, Tensor]:
    """Rows ``[d]`` of an example, by what it does."""
    scale = plan.longest

    def full(value: float) -> Tensor:
        return torch.full((plan.d,), value, dtype=torch.float64)

    last = full(0)
    last[-1] = scale
    canaries = {
        "has the longest row": full(scale),
        "moves one coordinate": last,
        "is 1e150": full(1e150),
        "is 1e-150": full(1e-150),
        "is NaN": full(torch.nan),
        "is infinite": torch.where(last > 0, torch.inf, last),
    }
    for number, layer in enumerate(plan.columns):
        row = full(1e-3 * scale)
        row[layer] = scale
        canaries[f"moves layer {number} most"] = row
    return canaries


def _worlds(plan: ExamplePlan, rounds: int, runs: int, seed: int) -> Check:
    """Every client is a run of its own: half of them have the canary, the others do not."""
    rounds = max(1, min(rounds, FEW // plan.steps))
    plan = replace(plan, d=8)
    rows = _zeros(plan, 2 * runs)
    rows[runs:, 0] = plan.longest
    run = observe_examples(plan, rows, rounds, seed)
    seen = run.releases.reshape(2 * runs, -1, plan.d)
    claim = Claim((plan.event.times(rounds),), plan.privacy.delta)
    found = distinguish("example", seen[:runs], seen[runs:], np.ones(plan.d), claim, RISK)
    alarms, missed = (
        np.array([count]) for count in (found.box.false_positives, found.box.false_negatives)
    )
    compared = missed_statistic(alarms, missed, found.box.trials, claim, f", by {found.score}")
    looked = (
        f"{runs} clients without and {runs} with a canary, {rounds} rounds, "
        f"epsilon {claim.epsilon:.3g}"
    )
    return statistical("plan", "two worlds", looked, [compared])

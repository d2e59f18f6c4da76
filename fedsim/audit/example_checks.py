"""Example level, through the trainer: noise, batches, one example's reach, two worlds, charges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import chdtr
from torch import Tensor

from fedsim.audit.adversarial_clients import LENGTHS, NUMBERS
from fedsim.audit.checks import Check, Statistic, invariant, statistical
from fedsim.audit.claim import Claim
from fedsim.audit.example_runs import ExamplePlan, ExampleRun, observe_examples
from fedsim.audit.ledger_checks import (
    AFFORDABLE,
    accounting_check,
    box_p,
    budget_between,
    budget_check,
)
from fedsim.audit.noise_checks import grid_checks, noise_checks, repeats
from fedsim.audit.noise_scale import Scale
from fedsim.audit.sampling_checks import draw_checks
from fedsim.audit.two_world import distinguish
from fedsim.audit.worlds import LENGTH

Floats = npt.NDArray[np.float64]

CLIENTS = 2
D = 512
RELEASES = 100
FEW = 12
FAINT = 1e-3
"""A noise multiplier at which a release shows who was in it."""
SLACK = 1e-6
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
    noise, std = _noise(plan, seed)
    checks = [*noise, *_batches(plan, seed)]
    if std is not None:
        checks += _reach(plan, std, seed)
    checks += [*_several(plan, seed), _system(plan), _budget(plan, seed)]
    claim = Claim((plan.event.times(rounds),), plan.privacy.delta)
    checks += [_worlds(plan, rounds, runs, seed), accounting_check(claim, seed)]
    return [replace(check, name=f"{check.name}, examples") for check in checks]


def _adapts(plan: ExamplePlan) -> bool:
    """Whether later steps depend on earlier ones, in ways that only the client knows."""
    return bool(plan.privacy.mechanism.init(plan.layout(D)))


def _first_steps(plan: ExamplePlan, run: ExampleRun) -> Floats:
    """Releases whose bound is known, ``[clients, releases, d]``."""
    clients, _, _, d = run.releases.shape
    known = run.releases[:, :, :1] if _adapts(plan) else run.releases
    return known.reshape(clients, -1, d)


def _rounds(plan: ExamplePlan) -> int:
    """As many rounds as there is something to see in."""
    return -(-RELEASES // (1 if _adapts(plan) else plan.steps))


def _noise(plan: ExamplePlan, seed: int) -> tuple[list[Check], Floats | None]:
    """Examples whose gradients are zero: what is released is noise; and its std, ``[d]``."""
    rounds = _rounds(plan)
    layout, mechanism = plan.layout(D), plan.privacy.mechanism
    zeros = torch.zeros(CLIENTS, plan.size, D, dtype=torch.float64)
    run = observe_examples(plan, zeros, rounds, seed)
    released = _first_steps(plan, run)
    checks = [_charges(plan, run, rounds)]
    silent = (released == 0).all(-1)
    looked = f"{CLIENTS} clients of {plan.size} examples, {released.shape[1]} gradients each"
    broken = f"{int(silent.sum())} gradients without noise" if silent.any() else None
    checks.append(invariant("noise", "presence", looked, broken, "noise in every gradient"))
    if broken:
        return checks, None
    scale = Scale.of(mechanism, mechanism.init(layout), layout)
    # Where a zero row is moved to the center, how many there were is not known here.
    units = (released - scale.center) * plan.denominator / scale.half
    stds = np.empty(D)
    for columns in plan.columns(D):
        stds[columns] = np.sqrt(np.square(units[..., columns]).mean())
    if not np.abs(scale.zero).any():
        checks += noise_checks(units / stds, plan.columns(D))
        checks += grid_checks(scale.steps(released, plan.denominator), plan.columns(D))
    return checks, stds * scale.half / plan.denominator


def _charges(plan: ExamplePlan, run: ExampleRun, rounds: int) -> Check:
    """One line a round, saying what the plan says, and as many steps as were seen."""
    broken = None
    for client, entries in enumerate(run.entries):
        if [entry.round for entry in entries] != list(range(1, rounds + 1)):
            broken = f"client {client} has lines for rounds {[entry.round for entry in entries]}"
        elif any(entry.event != plan.event for entry in entries):
            broken = f"client {client}'s lines do not say what a round costs"
    steps = int((run.releases != 0).any(-1).sum(-1).max(initial=0))
    if plan.release_plan.sampler.gaussians(steps) > plan.event.count:
        broken = f"{steps} gradients a round were released, {plan.event.count} are charged"
    return invariant(
        "ledger", "a line for every round", f"{rounds} rounds of {len(run.entries)} clients",
        broken, "one a client, for all its gradients",
    )  # fmt: skip


def _batches(plan: ExamplePlan, seed: int) -> list[Check]:
    """Each example moves a coordinate of its own, under hardly any noise: who was in shows."""
    rounds = _rounds(plan)
    d = max(plan.size, 8)
    faint = replace(plan, privacy=replace(plan.privacy, noise_multiplier=FAINT))
    scale = Scale.of(plan.privacy.mechanism, plan.privacy.mechanism.init(plan.layout(d)),
                     plan.layout(d))  # fmt: skip
    rows = torch.zeros(CLIENTS, plan.size, d, dtype=torch.float64)
    rows[:, torch.arange(plan.size), torch.arange(plan.size)] = LENGTH * float(scale.half.max())
    run = observe_examples(faint, rows, rounds, seed)
    released = _first_steps(faint, run)
    added = (released - scale.center) * plan.denominator / scale.half
    most = float(added[..., : plan.size].max())
    looked = f"{CLIENTS} clients of {plan.size} examples, {released.shape[1]} batches each"
    broken = f"{most:.4g} times its bound" if most > 1 + 10 * FAINT * D else None
    if not _adapts(plan) and most > 1 + 10 * FAINT:
        broken = f"{most:.4g} times its bound"
    checks = [
        invariant("bound", "what each example adds", looked, broken, "its bound at most"),
    ]
    draws = [[np.flatnonzero(row[: plan.size] > 0.5) for row in client] for client in added]
    if _adapts(plan) and np.abs(scale.zero).any():
        return checks
    if plan.event.law.inclusion(plan.size) is None:
        return [*checks, _passes(plan, draws, looked)]
    return [*checks, *draw_checks(draws, plan.event, plan.size, "examples")]


def _passes(plan: ExamplePlan, draws: list[list[npt.NDArray[np.int64]]], looked: str) -> Check:
    """In every pass each example is in one batch."""
    broken = None
    if not _adapts(plan):
        length = -(-plan.size // plan.work.batch_of(plan.size))
        for client in draws:
            for first in range(0, len(client) - len(client) % length, length):
                counts = np.bincount(np.concatenate(client[first : first + length]),
                                     minlength=plan.size)  # fmt: skip
                # A round may end within a pass; a pass that begins in it is then charged whole.
                if counts.max() > 1 and plan.steps % length == 0:
                    broken = "an example was in two batches of one pass"
    return invariant("sampler", "passes", looked, broken, "each example once a pass")


def _several(plan: ExamplePlan, seed: int) -> list[Check]:
    """Several examples of many lengths at once, and several that are not finite."""
    d, layout = max(plan.size, 8), plan.layout(max(plan.size, 8))
    mechanism = plan.privacy.mechanism
    scale = Scale.of(mechanism, mechanism.init(layout), layout)
    faint = replace(plan, privacy=replace(plan.privacy, noise_multiplier=FAINT))
    rows = torch.zeros(len(NUMBERS), plan.size, d, dtype=torch.float64)
    broken_rows = rows.clone()
    for client, number in enumerate(NUMBERS):
        for example in range(min(number, plan.size)):
            length = LENGTHS[(7 * example + client) % len(LENGTHS)]
            rows[client, example, example] = length * float(scale.half[example])
            broken_rows[client, example] = torch.nan
    rounds = 1 if _adapts(plan) else max(1, -(-FEW // plan.steps))
    released = _first_steps(faint, observe_examples(faint, rows, rounds, seed))
    added = (released - scale.center) * plan.denominator / scale.half
    most = float(added[..., : plan.size].max())
    spare = 10 * FAINT * (D if _adapts(plan) else 1)
    looked = f"{len(NUMBERS)} clients, of .5 to 5 C, {released.shape[1]} batches each"
    checks = [
        invariant(
            "bound", "what several examples add", looked,
            f"{most:.4g} times its bound" if most > 1 + spare else None, "its bound at most",
        )
    ]  # fmt: skip
    if mechanism.init(layout):
        return checks
    zeros, failed = (
        observe_examples(plan, examples, rounds, seed).releases
        for examples in (torch.zeros_like(rows), broken_rows)
    )
    broken = None if np.array_equal(zeros, failed) else "gradients differ from those of zeros"
    looked = f"{len(NUMBERS)} clients of 1 to all examples that are NaN"
    return [
        *checks,
        invariant("plan", "several fail at once", looked, broken, "as if their gradients were 0"),
    ]


def _system(plan: ExamplePlan) -> Check:
    """With entropy from the system no two clients and rounds have noise in common."""
    d = 8
    rows = torch.zeros(MANY, plan.size, d, dtype=torch.float64)
    rounds = max(1, -(-SYSTEM_RELEASES // (MANY * plan.steps)))
    releases = observe_examples(plan, rows, rounds, None).releases.reshape(-1, d)
    releases = releases[(releases != 0).any(1)]
    check = repeats(releases, f"{len(releases):,} gradients of {MANY} clients")
    return replace(check, name="noise of the system's")


def _budget(plan: ExamplePlan, seed: int) -> Check:
    """Clients stop where their budgets are spent."""
    budget = budget_between(plan.event, plan.privacy.delta)
    limited = replace(plan, privacy=replace(plan.privacy, max_epsilon=budget))
    rows = torch.zeros(CLIENTS, plan.size, 8, dtype=torch.float64)
    run = observe_examples(limited, rows, AFFORDABLE + 3, seed)
    rounds = (run.releases != 0).any((2, 3)).sum(1)
    released = {f"client {client}": int(number) for client, number in enumerate(rounds)}
    return budget_check(released, f"{AFFORDABLE + 3} rounds at a budget of epsilon {budget:.4g}")


def _reach(plan: ExamplePlan, std: Floats, seed: int) -> list[Check]:
    """With and without one example, all else equal, at the worst rows there are."""
    layout, mechanism = plan.layout(D), plan.privacy.mechanism
    scale = LENGTH * float(Scale.of(mechanism, mechanism.init(layout), layout).half.max())
    names, canaries = zip(*_canaries(plan, scale).items(), strict=True)
    without = torch.full((len(names), plan.size, D), -scale, dtype=torch.float64)
    without[:, 0] = 0
    present = without.clone()
    present[:, 0] = torch.stack(canaries)
    # Long enough for each client's canary to be in several of its batches.
    steps = 1 if _adapts(plan) else plan.steps
    rounds = max(1, -(-4 * plan.size // int(plan.denominator * steps)))
    observed = [observe_examples(plan, rows, rounds, seed) for rows in (without, present)]
    runs = [_first_steps(plan, run) for run in observed]
    most, whose, broken = 0.0, "none", None
    for name, before, after in zip(names, *runs, strict=True):
        if not np.isfinite(after).all():
            broken = f"an example that {name} makes a gradient that is not finite"
            continue
        length = float(np.linalg.norm((after - before) / std, axis=1).max())
        if not length <= most:
            most, whose = length, name
    allowed = 1 / plan.event.total_noise_multiplier
    width = min(columns.stop - columns.start for columns in plan.columns(D))
    values = CLIENTS * RELEASES * width
    layers = len(plan.columns(D))

    def p(length: float) -> float:
        if not 0 < length < np.inf:
            return 1.0 if length == 0 else 0.0
        ratio = (allowed * (1 + SLACK) / length) ** 2
        return min(1.0, layers * float(chdtr(values, values * ratio)))

    looked = f"{len(names)} clients of {plan.size} examples"
    checks = [_reports(plan, observed[0], observed[1], looked)]
    if broken:
        return [
            *checks,
            invariant("bound", "what one example moves", looked, broken, "finite gradients"),
        ]
    compared = Statistic(
        f"{{}} std of the noise, by one that {whose} ({allowed:.5g} is claimed)",
        np.array([most]), np.array([p(most)]), lambda _, x: p(max(x, 0.0)), allowed,
    )  # fmt: skip
    return [*checks, statistical("bound", "what one example moves", looked, [compared])]


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


def _canaries(plan: ExamplePlan, scale: float) -> dict[str, Tensor]:
    def full(value: float) -> Tensor:
        return torch.full((D,), value, dtype=torch.float64)

    last = torch.zeros(D, dtype=torch.float64)
    last[-1] = scale
    canaries = {
        "pulls as hard as it can": full(scale),
        "moves one coordinate": last,
        "is 1e150": full(1e150),
        "is 1e-150": full(1e-150),
        "is NaN": full(torch.nan),
        "is infinite": torch.where(last > 0, torch.inf, last),
    }
    for number, columns in enumerate(plan.columns(D)):
        row = torch.full((D,), 1e-3 * scale, dtype=torch.float64)
        row[columns] = scale
        canaries[f"moves layer {number} most"] = row
    return canaries


def _worlds(plan: ExamplePlan, rounds: int, runs: int, seed: int) -> Check:
    """Every client is a run of its own: half of them have the canary, the others do not."""
    rounds = max(1, min(rounds, FEW // plan.steps))
    d = 8
    layout = plan.layout(d)
    mechanism = plan.privacy.mechanism
    scale = LENGTH * float(Scale.of(mechanism, mechanism.init(layout), layout).half.max())
    rows = torch.zeros(2 * runs, plan.size, d, dtype=torch.float64)
    rows[runs:, 0] = scale
    run = observe_examples(plan, rows, rounds, seed)
    seen = run.releases.reshape(2 * runs, -1, d)
    claim = Claim((plan.event.times(rounds),), plan.privacy.delta)
    verdict = distinguish("example", seen[:runs], seen[runs:], np.ones(d), claim, RISK)
    half, counts = verdict.box.trials, verdict.box
    compared = Statistic(
        f"{{}} of {half} missed with {counts.false_positives} false positives, by {verdict.score}",
        np.array([float(counts.false_negatives)]), np.array([verdict.p_value]),
        lambda _, missed: box_p(counts.false_positives, round(missed), half, claim), float(half),
        whole=True,
    )  # fmt: skip
    looked = (
        f"{runs} clients without and {runs} with a canary, {rounds} rounds, "
        f"epsilon {claim.epsilon:.3g}"
    )
    return statistical("plan", "two worlds", looked, [compared])

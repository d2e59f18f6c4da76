"""Example level, through the trainer: noise, batches, one example's reach, two worlds, charges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import chdtr
from torch import Tensor

from fedsim.audit.checks import Check, invariant
from fedsim.audit.claim import Claim
from fedsim.audit.draws import draw_checks
from fedsim.audit.example_runs import ExamplePlan, ExampleRun, observe_examples
from fedsim.audit.ideal import accounting_check
from fedsim.audit.noise import noise_checks
from fedsim.audit.standard import Scale
from fedsim.audit.two_world import distinguish
from fedsim.audit.worlds import LENGTH

__all__ = ["example_checks"]

Floats = npt.NDArray[np.float64]

CLIENTS = 2
D = 512
RELEASES = 100
FEW = 12
FAINT = 1e-3
"""A noise multiplier at which a release shows who was in it."""
SLACK = 1e-6
RISK = 1e-3


def example_checks(plan: ExamplePlan, rounds: int, runs: int, seed: int) -> list[Check]:
    """Every test of clients of one size.

    Parameters
    ----------
    rounds : int
        Of the run that is audited.
    runs : int
        Clients without the canary, and as many with it, that are told apart.
    """
    noise, std = _noise(plan, seed)
    checks = [*noise, *_batches(plan, seed)]
    if std is not None:
        checks.append(_reach(plan, std, seed))
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
    if plan.event.sampler != "shuffle" and steps > plan.event.count:
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
    if plan.event.sampler == "shuffle":
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


def _reach(plan: ExamplePlan, std: Floats, seed: int) -> Check:
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
    runs = [
        _first_steps(plan, observe_examples(plan, rows, rounds, seed))
        for rows in (without, present)
    ]
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
    p = 1.0 if most == 0 else 0.0
    if 0 < most < np.inf:
        ratio = (allowed * (1 + SLACK) / most) ** 2
        p = min(1.0, len(plan.columns(D)) * float(chdtr(values, values * ratio)))
    return Check(
        "bound", "what one example moves", f"{len(names)} clients of {plan.size} examples",
        broken or f"{most:.4g} std of the noise, by one that {whose}",
        f"{allowed:.4g} at most", 0.0 if broken else p,
    )  # fmt: skip


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
    alarms, missed = verdict.box.bounds
    return Check(
        "plan", "told apart", f"{runs} clients without and {runs} with a canary, {rounds} rounds, "
        f"epsilon {claim.epsilon:.3g}",
        f"errors of at most {alarms:.3f}, {missed:.3f}, by {verdict.score}",
        f"{alarms:.3f}, {float(claim.curve(alarms)):.3f} or more", verdict.p_value,
    )  # fmt: skip

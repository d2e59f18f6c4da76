"""Conformance of the ledger: what was released against what was charged, line by line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsim.audit.checks import Check, invariant
from fedsim.audit.observe import Observation
from fedsim.privacy import Accountant, Event

__all__ = ["AFFORDABLE", "budget_between", "budget_check", "charge_checks", "promise_check"]

AFFORDABLE = 2
"""Rounds that the budgets of an audit allow."""


def charge_checks(runs: Sequence[Observation], planned: Event) -> list[Check]:
    """Whether every release has its line in time, and every line says what the plan does.

    Parameters
    ----------
    runs : sequence of Observation
        Runs of one plan, whatever their data and seed.
    planned : Event
        What the plan says that one round costs.
    """
    looked = f"{sum(len(seen.moves) for seen in runs):,} rounds in {len(runs)} runs"
    return [
        invariant("ledger", "a line for every release", looked, _uncharged(runs),
                  "one, written before the release is seen"),
        invariant("ledger", "what a line says", looked, _other_event(runs, planned),
                  "what the sampler and the noise multiplier give"),
        invariant("ledger", "one line, one release", looked, _twice(runs), "no round twice"),
        invariant("plan", "rounds", looked, _stopped(runs), "as many as planned"),
    ]  # fmt: skip


def promise_check(entries: Sequence[Event], rounds: int, promised: float, delta: float) -> Check:
    """Whether the ledger of a whole run comes to no more than was promised before it.

    Parameters
    ----------
    entries : sequence of Event
        Of equal rounds, perhaps fewer than planned.
    rounds : int
        How many are planned.
    promised : float
        Epsilon at ``delta``.
    """
    accountant = Accountant()
    for event in entries:
        accountant.add(event)
    if entries and len(entries) < rounds:
        accountant.add(entries[-1], rounds - len(entries))
    epsilon = accountant.epsilon(delta)
    more = not epsilon <= promised * (1 + 1e-3)
    return invariant(
        "ledger", "epsilon of the run", f"{rounds:,} rounds",
        f"the ledger comes to {epsilon:.4g}" if more or not math.isfinite(epsilon) else None,
        f"epsilon {promised:.4g} as promised",
    )  # fmt: skip


def budget_between(event: Event, delta: float) -> float:
    """A budget that allows `AFFORDABLE` rounds, and not one more."""
    costs = [Accountant([event.times(n)]).epsilon(delta) for n in (AFFORDABLE, AFFORDABLE + 1)]
    return sum(costs) / 2


def budget_check(released: dict[str, int], looked_at: str) -> Check:
    """Whether runs with a budget of `budget_between` release what it allows, and no more.

    Parameters
    ----------
    released : mapping of str to int
        Rounds of each run.
    """
    more = next((f"{n} rounds in {run}" for run, n in released.items() if n > AFFORDABLE), None)
    return invariant(
        "ledger", "budget", looked_at, more, f"{AFFORDABLE} rounds, which is what it allows"
    )


def _uncharged(runs: Sequence[Observation]) -> str | None:
    for seen in runs:
        lines = {entry.round for entry in seen.entries}
        for index, move in enumerate(seen.moves):
            if not (move != 0).any():
                continue
            if index + 1 not in lines:
                return f"round {index + 1} moved the model and has no line"
            if index < len(seen.charged) and seen.charged[index] <= index:
                return f"round {index + 1} was seen before its line was written"
    return None


def _other_event(runs: Sequence[Observation], planned: Event) -> str | None:
    for seen in runs:
        for entry in seen.entries:
            if entry.event != planned:
                return f"round {entry.round} says {_words(entry.event)}, not {_words(planned)}"
    return None


def _words(event: Event) -> str:
    return (
        f"{event.count} x {event.sampler} at rate {event.rate:g}, noise multiplier "
        f"{event.total_noise_multiplier:.6g}, {event.relation}"
    )


def _twice(runs: Sequence[Observation]) -> str | None:
    for seen in runs:
        rounds = [entry.round for entry in seen.entries]
        if len(set(rounds)) != len(rounds):
            return "a round has two lines"
    return None


def _stopped(runs: Sequence[Observation]) -> str | None:
    for seen in runs:
        if seen.ended:
            return f"a run ended early: {seen.ended}"
        if seen.released != len(seen.moves):
            return f"{seen.released} of {len(seen.moves)} rounds moved the model"
    return None

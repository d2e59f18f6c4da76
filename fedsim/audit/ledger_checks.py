"""What was charged against what was released, and whether its epsilon is large enough.

Neighbouring federations under the ledger's own events have known distributions, and their
likelihood ratio can be drawn: the optimal attack. What it achieves must be allowed by the claimed
curve: nothing of the strategy is in this, only the accounting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import bdtrc

from fedsim.audit.checks import (
    Check,
    Floats,
    Ids,
    Statistic,
    Subject,
    counted,
    invariant,
    statistical,
)
from fedsim.audit.claim import Claim, box_p_value
from fedsim.audit.observation import Observation
from fedsim.privacy import Accountant, Event
from fedsim.privacy.losses import DiscretePair
from fedsim.randomness import Purpose, Randomness

AFFORDABLE = 2
"""Rounds that the budgets of an audit allow."""
RUNS = 20_000
LEVELS = np.array([0.001, 0.01, 0.05, 0.2, 0.5])


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

    def check(subject: Subject, name: str, expected: str, find: Find) -> Check:
        found = next((broken for seen in runs if (broken := find(seen))), None)
        return invariant(subject, name, looked, found, expected)

    return [
        check("ledger", "a line for every release", "one, written before the release is seen",
              _uncharged),
        check("ledger", "what a line says", "what the sampler and the noise multiplier give",
              lambda seen: _other_event(seen, planned)),
        check("ledger", "one line, one release", "no round twice", _charged_twice),
        check("plan", "rounds", "as many as planned", _not_released),
    ]  # fmt: skip


Find = Callable[[Observation], str | None]


def _uncharged(seen: Observation) -> str | None:
    lines = {entry.round for entry in seen.entries}
    for index, move in enumerate(seen.moves):
        if not (move != 0).any():
            continue
        if index + 1 not in lines:
            return f"round {index + 1} moved the model and has no line"
        if index < len(seen.charged) and seen.charged[index] <= index:
            return f"round {index + 1} was seen before its line was written"
    return None


def _other_event(seen: Observation, planned: Event) -> str | None:
    for entry in seen.entries:
        if entry.event != planned:
            return f"round {entry.round} says {_words(entry.event)}, not {_words(planned)}"
    return None


def _words(event: Event) -> str:
    return (
        f"{event.count} x {event.law.label}, noise multiplier "
        f"{event.total_noise_multiplier:.6g}, {event.adjacency}"
    )


def _charged_twice(seen: Observation) -> str | None:
    rounds = [entry.round for entry in seen.entries]
    return "a round has two lines" if len(set(rounds)) != len(rounds) else None


def _not_released(seen: Observation) -> str | None:
    if seen.ended:
        return f"a run ended early: {seen.ended}"
    if seen.released != len(seen.moves):
        return f"{seen.released} of {len(seen.moves)} rounds moved the model"
    return None


def promise_check(entries: Sequence[Event], rounds: int, promised: float, delta: float) -> Check:
    """Whether the epsilon of a whole run's ledger is no more than the one computed before it.

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
        f"the ledger's epsilon is {epsilon:.4g}" if more or not math.isfinite(epsilon) else None,
        f"epsilon {promised:.4g}, as computed before the run",
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


def accounting_check(claim: Claim, seed: int) -> Check:
    """Whether the claimed curve, and epsilon at delta, lie below what the events leak."""
    draws = Randomness(seed).generator(Purpose.AUDIT, level="run", part=8)
    absent, present = log_likelihood_ratios(claim.events, RUNS, draws)
    half = RUNS // 2
    thresholds = np.quantile(absent[:half], 1 - LEVELS)
    alarms = np.array([(absent[half:] > level).sum() for level in thresholds])
    missed = np.array([(present[half:] <= level).sum() for level in thresholds])
    # delta at epsilon is the mean of max(0, 1 - exp(epsilon - loss)) with the canary. A coin that
    # shows heads with that probability makes it a binomial count, which has an exact test.
    excess = -np.expm1(np.minimum(claim.epsilon - present, 0.0))
    hits = int((draws.random(RUNS) < excess).sum())

    def p_of(hits: Floats) -> Floats:
        possible = np.minimum(hits, RUNS)
        return np.where(hits > 0, bdtrc(np.maximum(possible - 1, 0), RUNS, claim.delta), 1.0)

    words = f"{{}} of {RUNS:,} beyond epsilon {claim.epsilon:.4g}"
    delta = counted(words, [hits], p_of, RUNS * claim.delta)
    return statistical(
        "ledger", "epsilon of the events", f"{RUNS:,} draws of the optimal attack on each side",
        [missed_statistic(alarms, missed, half, claim), delta],
    )  # fmt: skip


def missed_statistic(
    alarms: Ids, missed: Ids, trials: int, claim: Claim, score: str = ""
) -> Statistic:
    """False negatives of attacks against the claim's curve; shown is the most significant.

    Parameters
    ----------
    alarms, missed : int64 ``[n]``
        Errors of each attack, in ``trials`` runs without and ``trials`` runs with the canary.
    score : str
        What the attack was, for its words.
    """

    def p(counts: Floats, index: Any) -> Floats:
        return box_p_value(alarms[index], counts.astype(np.int64), trials, claim)

    every = Statistic("", missed.astype(np.float64), p, float(trials), whole=True)
    shown = f"{alarms[int(every.p_values.argmin())]:,} false positives"
    return replace(every, words=f"{{}} of {trials:,} missed with {shown}{score}")


def log_likelihood_ratios(
    events: Sequence[Event], runs: int, draws: np.random.Generator
) -> tuple[Floats, Floats]:
    """Of runs without and with one row at the bound, ``[runs]`` each.

    Where neighbours replace a row, the first send it at the bound's other end.
    """
    counts: dict[Event, int] = {}
    for event in events:
        counts[event] = counts.get(event, 0) + event.count
    absent, present = np.zeros(runs), np.zeros(runs)
    for event, count in counts.items():
        z, q = event.total_noise_multiplier, event.law.rate
        if not event.law.is_gaussian:
            _add_losses(event, count, absent, present, draws)
            continue
        opposite = -1.0 if event.adjacency == "replace-one" else 0.0
        if q == 1:
            # Equal Gaussians add up to one.
            z, count = z / np.sqrt(count), 1
        for _ in range(count):
            for ratios, shift in ((absent, opposite), (present, 1.0)):
                sampled = draws.random(runs) < q
                y = shift * sampled + z * draws.standard_normal(runs)
                ratios += _mixture(y, 1.0, q, z) - _mixture(y, opposite, q, z)
    return absent, present


def _add_losses(
    event: Event, count: int, absent: Floats, present: Floats, draws: np.random.Generator
) -> None:
    """Losses of a law that is data, drawn from its own pair.

    Where it has none they are 0: an attack that does not look at these releases.
    """
    pairs = event.law.pairs(event.total_noise_multiplier)
    if pairs is None or not isinstance(pairs[0], DiscretePair):
        return
    losses, upper, lower = pairs[0].distributions()
    for _ in range(count):
        absent += draws.choice(losses, len(absent), p=lower)
        present += draws.choice(losses, len(present), p=upper)


def _mixture(y: Floats, shift: float, q: float, z: float) -> Floats:
    """Log density of ``(1 - q) N(0, z^2) + q N(shift, z^2)`` over that of ``N(0, z^2)``."""
    if shift == 0:
        return np.zeros_like(y)
    log_absent = np.log1p(-q) if q < 1 else -np.inf
    return np.asarray(np.logaddexp(log_absent, np.log(q) + (shift * y - shift**2 / 2) / z**2))

"""Checks of ledgers: what was charged against what was released, and the ledger's epsilon.

A ledger's own events determine the distributions of neighbouring federations, so that their
likelihood ratio, the optimal attack, can be simulated. The claimed curve must allow its errors:
this tests the accounting alone, not the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import bdtrc
from whitebox.target import Observation

from fedsim.array_types import Floats
from fedsim.audit.claim import Claim, missed_statistic
from fedsim.audit.findings import Finding, counted, invariant, statistical
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Event
from fedsim.privacy.losses import DiscretePair
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose, Randomness

AFFORDABLE_ROUNDS = 2
"""Number of rounds that the budgets of an audit allow."""
OPTIMAL_ATTACK_DRAWS = 20_000
LEVELS = np.array([0.001, 0.01, 0.05, 0.2, 0.5])


def no_fault(
    fault: Callable[[Observation, ReleasePlan[Any]], str | None],
    expected: str,
    runs: Sequence[Observation],
    planned: ReleasePlan[Any],
) -> Finding:
    """Whether no run has the fault that the function ``fault`` describes if a run has it."""
    examined = f"{sum(len(run.moves) for run in runs):,} rounds in {len(runs)} runs"
    sentence = next((words for run in runs if (words := fault(run, planned))), None)
    return invariant(examined, sentence, expected)


def uncharged_release(run: Observation, planned: ReleasePlan[Any]) -> str | None:
    """A release that has no line in the ledger, or was visible before its line was written."""
    lines = {entry.round for entry in run.entries}
    for index in np.flatnonzero((run.moves != 0).any(1)).tolist():
        if index + 1 not in lines:
            return f"round {index + 1} moved the model and has no line"
        if index < len(run.charged) and run.charged[index] <= index:
            return f"round {index + 1} was seen before its line was written"
    return None


def other_event(run: Observation, planned: ReleasePlan[Any]) -> str | None:
    """A line with another event or bound than the plan's in its round."""
    for entry in run.entries:
        number = entry.round or 0
        if entry.event != (expected := planned.charge(number)):
            return f"round {number} says {_words(entry.event)}, not {_words(expected)}"
        # A line may name a round that the run did not make; it then has no clip norm.
        plan = ", C = ".join(map(str, [planned.mechanism, *run.clip_norms[number - 1 : number]]))
        if (line := f"{entry.mechanism}, C = {entry.clip_norm}") != plan:
            return f"round {number} says {line}, not {plan}"
    return None


def other_entropy(run: Observation, planned: ReleasePlan[Any]) -> str | None:
    """A line of a run with a seed that does not say that its noise follows from the config."""
    lines = [entry for entry in run.entries if entry.entropy != "config"]
    return f"round {lines[0].round} says entropy {lines[0].entropy}" if lines else None


def second_line(run: Observation, planned: ReleasePlan[Any]) -> str | None:
    """A round with more than one line."""
    rounds = [entry.round for entry in run.entries]
    return "a round has two lines" if len(set(rounds)) != len(rounds) else None


def missing_round(run: Observation, planned: ReleasePlan[Any]) -> str | None:
    """A planned round that was not released."""
    if run.ended:
        return f"a run ended early: {run.ended}"
    few = run.released != len(run.moves)
    return f"{run.released} of {len(run.moves)} rounds moved the model" if few else None


def _words(event: Event) -> str:
    return (
        f"{event.count} x {event.law.label}, noise multiplier "
        f"{event.total_noise_multiplier:.6g}, {event.adjacency}"
    )


def epsilon_of_run(entries: Sequence[Event], rounds: int, promised: float, delta: float) -> Finding:
    """Whether the ledger's epsilon of a whole run is at most the one computed before the run.

    Parameters
    ----------
    entries : sequence of Event
        Events of equal rounds, perhaps fewer than planned.
    rounds : int
        Planned number of rounds.
    promised : float
        Epsilon at ``delta`` that was computed before the run.
    """
    accountant = Accountant(entries)
    if entries and len(entries) < rounds:
        accountant.add(entries[-1].further_rounds(rounds - len(entries), len(entries)))
    epsilon = accountant.epsilon(delta)
    fault = None if epsilon <= promised * (1 + 1e-3) else f"the ledger's epsilon is {epsilon:.4g}"
    expected = f"epsilon {promised:.4g}, as computed before the run"
    return invariant(f"{rounds:,} rounds", fault, expected)


def budget_between(event: Event, delta: float) -> float:
    """A budget (epsilon) that allows exactly `AFFORDABLE_ROUNDS` rounds."""
    costs = [Accountant([event.times(AFFORDABLE_ROUNDS + n)]).epsilon(delta) for n in (0, 1)]
    return sum(costs) / 2


def budget(released: Mapping[str, int], examined: str) -> Finding:
    """Whether runs with a budget of `budget_between` release no more rounds than it allows.

    Parameters
    ----------
    released : mapping of str to int
        Number of rounds that each run released.
    """
    more = [f"{n} rounds in {run}" for run, n in released.items() if n > AFFORDABLE_ROUNDS]
    return invariant(
        examined, more[0] if more else None, f"{AFFORDABLE_ROUNDS} rounds, which is what it allows"
    )


def accounting(claim: Claim, seed: int) -> Finding:
    """Whether the optimal attack on the events respects the claimed curve and (epsilon, delta)."""
    draws = Randomness(seed).generator(Purpose.AUDIT, level="run", part=8)
    absent, present = log_likelihood_ratios(claim.events, OPTIMAL_ATTACK_DRAWS, draws)
    half = OPTIMAL_ATTACK_DRAWS // 2
    thresholds = np.quantile(absent[:half], 1 - LEVELS)
    alarms = np.array([(absent[half:] > level).sum() for level in thresholds])
    missed = np.array([(present[half:] <= level).sum() for level in thresholds])
    # delta at epsilon is the mean of max(0, 1 - exp(epsilon - loss)) with the canary. Coins with
    # these probabilities of heads make a binomial count, which has an exact test.
    excess = -np.expm1(np.minimum(claim.epsilon - present, 0.0))
    hits = int((draws.random(OPTIMAL_ATTACK_DRAWS) < excess).sum())

    def p_of(hits: Floats) -> Floats:
        possible = np.minimum(hits, OPTIMAL_ATTACK_DRAWS)
        tail = bdtrc(np.maximum(possible - 1, 0), OPTIMAL_ATTACK_DRAWS, claim.delta)
        return np.where(hits > 0, tail, 1.0)

    words = f"{{}} of {OPTIMAL_ATTACK_DRAWS:,} beyond epsilon {claim.epsilon:.4g}"
    return statistical(
        f"{OPTIMAL_ATTACK_DRAWS:,} draws of the optimal attack on each side",
        missed_statistic(alarms, missed, half, claim),
        counted(words, [hits], p_of, OPTIMAL_ATTACK_DRAWS * claim.delta),
    )


def log_likelihood_ratios(
    events: Sequence[Event], runs: int, draws: np.random.Generator
) -> tuple[Floats, Floats]:
    """Draws of the log likelihood ratio without and with one row at the bound, ``[runs]`` each.

    For replace-one neighbours, "without" means the opposite row, also at the bound.
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
            # Equal unsampled Gaussian releases are together one with less noise.
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
    """Add losses drawn from the discretised pair of a law that the ledger stores as data.

    Without such a pair nothing is added: the attack ignores these releases.
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


def common_claim(claims: Iterable[Claim]) -> Claim:
    """The claim that all runs share.

    Raises
    ------
    FedsimError
        If the runs' claims differ, since a claim would then depend on the data.
    """
    distinct = set(claims)
    if len(distinct) != 1:
        raise FedsimError("the ledgers of equal runs make different claims.")
    return distinct.pop()

"""What may be claimed of a run that releases may end: valid whichever round is the last."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from fedsim.privacy import Accountant, Entry, Event, Ledger
from fedsim.privacy.claims import Stopping, shared_cost
from fedsim.privacy.entry import History
from fedsim.privacy.laws import PoissonLaw

DELTA = 1e-5


def history(*events: Event) -> History:
    return History(Entry(event=event) for event in events)


def gaussians(rounds: int, z: float) -> History:
    return history(Event(noise_multiplier=z, count=rounds))


def true_delta(z: float, first: int, rounds: int, claims: tuple[float, float]) -> float:
    """Delta of optimal stopping: after ``first`` of ``rounds`` unamplified Gaussians, or not.

    The privacy loss of n of them is N(n mu, 2 n mu) with mu = 1 / (2 z^2). Stopping at a loss l
    adds (1 - exp(claim - l))+; going on adds the same of the loss at the end, in expectation.
    """
    mu = 1 / (2 * z * z)
    std = np.sqrt(2 * first * mu)
    losses = np.linspace(first * mu - 9 * std, first * mu + 12 * std, 40_001)
    now = -np.expm1(np.minimum(claims[0] - losses, 0.0))
    left, mean = rounds - first, losses + (rounds - first) * mu
    rest = np.sqrt(2 * left * mu)
    tilted = np.exp(claims[1] - mean + rest**2 / 2) * norm.cdf((mean - claims[1]) / rest - rest)
    later = norm.cdf((mean - claims[1]) / rest) - tilted
    density = norm.pdf(losses, first * mu, std)
    return float((np.maximum(now, later) * density).sum() * (losses[1] - losses[0]))


@pytest.mark.parametrize(("z", "rounds"), [(5.0, 20), (10.0, 50), (20.0, 100)])
def test_the_lesser_of_two_figures_holds_at_delta_only_where_they_share_it(z, rounds):
    old, new = [], []
    for first in (1, rounds // 4, rounds // 2, rounds - 1):
        spent, planned = gaussians(first, z).accountant, gaussians(rounds, z).accountant
        # As if each were the only figure: the lesser of two that hold at delta.
        each = min(spent.epsilon(DELTA / 2), planned.epsilon(DELTA))
        old.append(true_delta(z, first, rounds, (each, planned.epsilon(DELTA))))
        stopping = Stopping(possible_ends=2, rounds_left=rounds - first)
        rounds_made = [Event(noise_multiplier=z)] * first
        stopped = stopping.epsilon(history(*rounds_made), DELTA)
        assert stopped == shared_cost(spent, planned, DELTA, 2).epsilon
        finished = stopping.after(rounds - first).epsilon(gaussians(rounds, z), DELTA)
        assert finished == planned.epsilon(DELTA / 2)
        new.append(true_delta(z, first, rounds, (stopped, finished)))
    assert max(old) > 1.4 * DELTA
    assert max(new) < DELTA
    # The reference itself: a single figure for both ends is exactly what it says.
    alone = planned.epsilon(DELTA)
    assert true_delta(z, rounds - 1, rounds, (alone, alone)) == pytest.approx(DELTA, rel=1e-2)


def test_an_end_that_was_not_declared_costs_all_planned_rounds():
    event = Event(noise_multiplier=3.0, law=PoissonLaw(rate=0.1))
    spent = history(*[event] * 4)
    planned = Accountant([event.times(30)])
    cost = Stopping(rounds_left=26).cost(spent, DELTA)
    assert cost.epsilon == planned.epsilon(DELTA)
    assert (cost.delta, cost.releases) == (DELTA, 4)
    assert Stopping().epsilon(spent, DELTA) == spent.accountant.epsilon(DELTA)


def test_a_budget_bounds_the_plan_only_where_it_was_one():
    event = Event(noise_multiplier=3.0, law=PoissonLaw(rate=0.1))
    spent = history(*[event] * 4)
    budget = 1.01 * spent.accountant.epsilon(DELTA / 2)
    within = Stopping(possible_ends=50, rounds_left=46, max_epsilon=budget, budget_delta=DELTA)
    assert within.epsilon(spent, DELTA) == budget
    # It was held at that delta, and says nothing of a smaller one.
    free = Stopping(possible_ends=50, rounds_left=46)
    assert within.epsilon(spent, DELTA / 10) == free.epsilon(spent, DELTA / 10)
    # What has been released already was not stopped by it.
    exceeded = Stopping(
        possible_ends=50, rounds_left=46, max_epsilon=0.5 * budget, budget_delta=DELTA
    )
    assert exceeded.epsilon(spent, DELTA) == free.epsilon(spent, DELTA)


def test_a_run_without_a_guarantee_has_none_however_it_ends():
    event = Event(noise_multiplier=0.0, guarantee=False)
    assert Stopping(possible_ends=9, rounds_left=8).epsilon(history(event), DELTA) == np.inf
    assert Stopping(possible_ends=9, rounds_left=9).epsilon(History(), DELTA) == 0


def test_what_a_raised_budget_allows_is_charged_however_many_rounds_were_charged_before():
    event = Event(noise_multiplier=10.0)
    ledger = Ledger(delta=DELTA)
    ledger.record(Entry(round=1, event=event, release="of a seed", entropy="config"))
    within = 1.001 * gaussians(3, 10.0).accountant.epsilon(DELTA)
    for plan in (
        Stopping(rounds_left=4, rounds_made=1, max_epsilon=within),
        Stopping(rounds_left=4, rounds_made=1),
    ):
        for _ in range(2):  # as often as it is asked
            ledger.charge_planned(replace(plan, budget_delta=DELTA))
    assert ledger.epsilon() == gaussians(5, 10.0).accountant.epsilon(DELTA)
    assert ledger.num_releases == 1

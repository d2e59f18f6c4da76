from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from slow_cases import hypothesis_examples

from fedsim.cohorts import FixedCohort, FullCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy import (
    Accountant,
    Event,
    calibrate,
    calibrate_events,
    epsilon,
    rounds_within,
    worst_client,
)
from fedsim.privacy.laws import PoissonLaw

COHORTS = [
    PoissonCohort(0.1),
    PoissonCohort(0.001),
    FullCohort(),
    FullCohort(adjacency="replace-one"),
    FixedCohort(30, 300),
]


@pytest.mark.spanning
@pytest.mark.parametrize("cohort", COHORTS, ids=str)
@pytest.mark.parametrize("target", [0.3, 2.0, 8.0])
def test_calibrated_noise_meets_the_target_and_no_less_would(cohort, target):
    z = calibrate(target_epsilon=target, cohort=cohort, rounds=100, delta=1e-5)
    spent = epsilon(noise_multiplier=z, cohort=cohort, rounds=100, delta=1e-5)
    assert spent <= target
    less = epsilon(noise_multiplier=z * (1 - 1e-3), cohort=cohort, rounds=100, delta=1e-5)
    assert less > target


@given(st.floats(0.05, 30), st.floats(1e-3, 1), st.integers(1, 2000), st.floats(-8, -3))
@hypothesis_examples(8)
def test_calibration_round_trips(target, rate, rounds, log_delta):
    delta, cohort = 10**log_delta, PoissonCohort(rate)
    # A row that is sampled with a probability of at most delta needs no noise for any epsilon.
    assume(1 - (1 - rate) ** rounds > 2 * delta)
    z = calibrate(target_epsilon=target, cohort=cohort, rounds=rounds, delta=delta)
    spent = epsilon(noise_multiplier=z, cohort=cohort, rounds=rounds, delta=delta)
    assert target * (1 - 1e-3) <= spent <= target


def test_published_noise_multipliers():
    full = calibrate(target_epsilon=5.0, cohort=FullCohort(), rounds=500, delta=1e-6)
    assert full == pytest.approx(21.9146, rel=1e-5)
    for target, z in ((5.0, 1.2104), (1.5, 2.8171)):
        found = calibrate(target_epsilon=target, cohort=PoissonCohort(0.1), rounds=100, delta=1e-5)
        assert found == pytest.approx(z, rel=2e-4)


def test_a_plan_of_several_events_is_calibrated_as_a_whole():
    cohort = PoissonCohort(0.01)

    def plan(z: float) -> list[Event]:
        return [
            Event.of(FullCohort(), 16.0),
            Event.of(cohort, z, count=500),
            Event.of(cohort, 2 * z, count=500),
        ]

    z = calibrate_events(plan, target_epsilon=2.0, delta=1e-5)
    assert Accountant(plan(z)).epsilon(1e-5) == pytest.approx(2.0, rel=1e-4)


def test_rounds_within_a_budget_are_the_most_that_fit():
    cohort = PoissonCohort(0.1)
    bought = rounds_within(max_epsilon=5.0, noise_multiplier=1.3, cohort=cohort, delta=1e-5)

    def spent(rounds: int) -> float:
        return epsilon(noise_multiplier=1.3, cohort=cohort, rounds=rounds, delta=1e-5)

    assert spent(bought) <= 5.0 < spent(bought + 1)
    assert rounds_within(max_epsilon=0.1, noise_multiplier=0.5, cohort=cohort, delta=1e-5) == 0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: calibrate(target_epsilon=0.0, cohort=COHORTS[0], rounds=1, delta=1e-5), "is 0.0"),
        (lambda: calibrate(target_epsilon=1e9, cohort=COHORTS[0], rounds=1, delta=1e-5), "meets"),
        (lambda: calibrate(target_epsilon=1.0, cohort=COHORTS[0], rounds=0, delta=1e-5), "rounds"),
        (lambda: calibrate(target_epsilon=1.0, cohort=COHORTS[0], rounds=1, delta=2.0), "delta"),
        (
            lambda: rounds_within(
                max_epsilon=5.0, noise_multiplier=math.inf, cohort=COHORTS[0], delta=1e-5
            ),
            "buys more than",
        ),
        (lambda: worst_client([], 1e-5), "no clients"),
    ],
)
def test_impossible_questions_get_a_sentence(call, named):
    with pytest.raises(FedsimError, match=named):
        call()


def test_the_statement_over_clients_is_the_worst_clients():
    sizes = [100, 150, 200, 400, 1000]
    events = [
        Event(noise_multiplier=1.2, law=PoissonLaw(rate=20 / n, population=n), count=n // 20 * 3)
        for n in sizes
    ]
    worst = worst_client(events * 3, delta=1e-5)
    every = [Accountant([event]).epsilon(1e-5) for event in events]
    assert worst == events[every.index(max(every))]


def test_a_client_without_guarantee_is_the_worst():
    events = [
        Event(noise_multiplier=1.2, law=PoissonLaw(rate=0.1)),
        Event(noise_multiplier=9.0, law=PoissonLaw(), guarantee=False),
    ]
    assert not worst_client(events, delta=1e-5).private

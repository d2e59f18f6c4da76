from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import strategies
from scipy.stats import binom, norm
from whitebox.ledger_checks import other_event
from whitebox.one_run import guesses_epsilon_bound, guesses_p_value
from whitebox.target import StrategyTarget

from fedsim.audit import Claim
from fedsim.audit.claim import (
    Box,
    box_p_value,
    epsilon_bound,
    upper_rate,
)
from fedsim.mechanisms import Clipping, Mechanism, QuantileClipping


def test_no_event_in_n_trials_bounds_the_rate_in_closed_form() -> None:
    assert upper_rate(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert upper_rate(100, 100, 0.05) == 1


@given(count=st.integers(0, 59), risk=st.floats(1e-6, 0.5))
def test_at_the_upper_rate_so_few_events_have_just_that_probability(
    count: int, risk: float
) -> None:
    assert binom.cdf(count, 60, upper_rate(count, 60, risk)) == pytest.approx(risk, rel=1e-6)


def test_p_values_of_boxes_are_valid_on_the_curve_itself() -> None:
    # The best attack on a Gaussian lies on its curve: no p-value may be small too often.
    claim, rng = Claim.gaussian(1.0), np.random.default_rng(1)
    false_positives = rng.binomial(300, norm.cdf(-0.5), 2000)
    false_negatives = rng.binomial(300, norm.cdf(-0.5), 2000)
    p_values = box_p_value(false_positives, false_negatives, 300, claim)
    for risk in (0.2, 0.05, 0.01):
        assert (p_values <= risk).mean() <= risk


def test_a_box_is_below_the_curve_at_every_risk_above_its_p_value() -> None:
    claim = Claim.gaussian(1.0)
    p = float(box_p_value(np.array([65]), np.array([65]), 300, claim)[0])
    assert 1e-9 < p < 1e-2
    for risk, below in ((1.01 * p, True), (0.99 * p, False)):
        x, y = Box(65, 65, 300, risk).bounds
        assert (y < claim.curve(x)) == below


def test_errorless_runs_bound_epsilon_by_their_number() -> None:
    high = float(upper_rate(0, 1000, 0.005))
    expected = math.log((1 - 1e-5 - high) / high)
    assert epsilon_bound(0, 0, 1000, 0.01, 1e-5) == pytest.approx(expected)
    assert epsilon_bound(500, 500, 1000, 0.01, 1e-5) == 0


@given(
    guesses=st.integers(1, 60),
    missed=st.integers(0, 60),
    epsilon=st.floats(0, 5),
)
def test_without_delta_guesses_are_held_against_a_binomial(
    guesses: int, missed: int, epsilon: float
) -> None:
    correct = max(guesses - missed, 1)
    expected = binom.sf(correct - 1, guesses, 1 / (1 + math.exp(-epsilon)))
    assert guesses_p_value(100, guesses, correct, epsilon, 0.0) == pytest.approx(expected, abs=1e-9)


def test_delta_costs_what_the_theorem_says() -> None:
    # All of r guesses right, m canaries: the sum over i is P[v > W >= v - i].
    r, m, q = 3, 5, 0.75
    w = binom(r, q)
    steepest = max((w.cdf(2) - w.cdf(2 - i)) / i for i in (1, 2, 3))
    expected = w.pmf(3) + 2 * m * 0.01 * steepest
    assert guesses_p_value(m, r, 3, math.log(3), 0.01) == pytest.approx(expected)


def test_two_hundred_right_guesses_prove_four_point_one_seven_at_most() -> None:
    bound = guesses_epsilon_bound(1000, 200, 200, 0.05, 1e-5)
    assert bound == pytest.approx(4.17, abs=0.03)
    assert guesses_epsilon_bound(1000, 200, 100, 0.05, 1e-5) == 0


@pytest.mark.parametrize("mechanism", [Clipping(0.5), QuantileClipping()])
def test_a_line_that_names_another_bound_than_the_rounds_own_is_a_fault(
    mechanism: Mechanism,
) -> None:
    target = StrategyTarget(strategies(mechanism, z=0.2), rounds=3)
    run = target.observe(target.silent_clients(), 1)
    assert other_event(run, target.plan) is None
    for change, words in (
        ({"clip_norm": 2.0}, r"round 3 says .* C = 2\.0, not"),
        ({"mechanism": "Clipping(clip_norm=9.0)"}, r"round 3 says Clipping\(clip_norm=9\.0\),"),
        ({"round": 9}, "round 9 says "),
    ):
        entries = (*run.entries[:2], replace(run.entries[2], **change))
        fault = other_event(replace(run, entries=entries), target.plan)
        assert re.match(words, fault or "")

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from fedsim.cohorts import FixedCohort, FullCohort, PoissonCohort
from fedsim.privacy import Accountant, Event, tradeoff
from fedsim.privacy.laws import PoissonLaw
from fedsim.privacy.losses import gaussian_delta, gaussian_epsilon
from fedsim.privacy.pld import MAX_WINDOW_POINTS, _deltas_at

ALARMS = np.linspace(0.001, 0.999, 300)
CASES = {
    "sampled": [Event.of(PoissonCohort(0.1), 1.2104, count=100)],
    "rare": [Event.of(PoissonCohort(0.01), 1.1, count=1000)],
    "mixed": [
        Event.of(PoissonCohort(0.2), 1.5, count=20),
        Event.of(PoissonCohort(0.1), 2.0, count=7),
    ],
    "fixed": [Event.of(FixedCohort(30, 100), 2.0, count=10)],
}


@pytest.mark.parametrize(
    ("event", "misses", "advantage", "mu", "epsilon", "by_mu"),
    [
        (
            Event.of(PoissonCohort(0.1), 1.2104, count=100),
            (0.98029, 0.90814, 0.75073, 0.62873), 0.35482, 1.2368, 5.0007, 5.6093,
        ),
        (
            Event.of(PoissonCohort(0.01), 1.1, count=1000),
            (0.99664, 0.97464, 0.89950, 0.82087), 0.14034, 0.4275, 1.5156, 1.6738,
        ),
        (
            Event.of(FullCohort(), 10.0, count=100),
            (0.98170, 0.90764, 0.74048, 0.61086), 0.38293, 1.0, 4.3772, 4.3772,
        ),
    ],
)  # fmt: skip
def test_the_curve_the_advantage_and_mu_are_those_of_the_table(
    event, misses, advantage, mu, epsilon, by_mu
):
    curve = tradeoff([event])
    np.testing.assert_allclose(curve([0.001, 0.01, 0.05, 0.1]), misses, atol=1e-4)
    assert curve.advantage == pytest.approx(advantage, abs=1e-4)
    assert curve.mu == pytest.approx(mu, abs=2e-4)
    assert Accountant([event]).epsilon(1e-5) == pytest.approx(epsilon, abs=2e-3)
    assert gaussian_epsilon(curve.mu, 1e-5) == pytest.approx(by_mu, abs=2e-3)


@pytest.mark.parametrize("mu", [0.4, 1.0, 2.5])
def test_a_gaussian_through_loss_distributions_is_the_analytic_curve_from_below(mu):
    exact = norm.cdf(norm.ppf(1 - ALARMS) - mu)
    closed = tradeoff([Event.of(FullCohort(), 1 / mu)])
    assert (closed(ALARMS) <= exact).all()
    np.testing.assert_allclose(closed(ALARMS), exact, atol=1e-11)
    rare = np.array([1e-30, 1e-18, 1e-15, 1e-9])  # 1 less such a rate has lost its digits
    assert (closed(rare) <= norm.sf(norm.ppf(rare) + mu)).all()
    # A second, negligible component takes the analytic way away.
    events = [Event.of(FullCohort(), 1 / mu), Event.of(PoissonCohort(1e-9), 50.0)]
    curve = tradeoff(events)
    assert curve.exact_mu is None
    assert (curve(ALARMS) <= exact + 1e-9).all()
    np.testing.assert_allclose(curve(ALARMS), exact, atol=2e-4)
    assert mu <= curve.mu == pytest.approx(mu, rel=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_mu_is_valid_and_the_gaussian_of_mu_lies_nowhere_above(name):
    accountant = Accountant(CASES[name])
    curve = tradeoff(accountant)
    epsilons = np.linspace(0, curve.epsilons[curve.deltas > 1.1e-10][-1], 200)
    if name == "fixed":  # of Rényi accounting the points are bounds, what lies between is not
        epsilons = curve.epsilons[curve.deltas > 1.1e-10]
    for epsilon in map(float, epsilons):
        assert gaussian_delta(curve.mu, epsilon) >= accountant.delta(epsilon) * (1 - 1e-5)
    assert (norm.cdf(norm.ppf(1 - ALARMS) - curve.mu) <= curve(ALARMS) + 1e-4).all()


@pytest.mark.parametrize("name", CASES)
def test_a_curve_falls_is_convex_and_below_every_line_of_the_accountant(name):
    accountant = Accountant(CASES[name])
    curve = tradeoff(accountant)
    alarms = np.linspace(0, 1, 201)
    slopes = np.diff(curve(alarms))
    assert (slopes <= 1e-12).all()
    assert (np.diff(slopes) >= -1e-9).all()
    assert curve(1.0) == 0.0
    assert 0.999 < curve(0.0) <= 1.0
    # Symmetric: exchanging false alarms and misses changes nothing.
    missed = curve(ALARMS)
    np.testing.assert_allclose(curve(missed[missed > 0]), ALARMS[missed > 0], atol=2e-3)
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        line = 1 - accountant.delta(epsilon) - np.exp(epsilon) * ALARMS
        assert (missed >= line - 2e-4).all()


def test_nothing_claimed_is_nothing_missed():
    curve = tradeoff([Event(noise_multiplier=1.0, law=PoissonLaw(), guarantee=False)])
    assert (curve(ALARMS) == 0).all()
    assert (curve.advantage, curve.mu) == (1.0, np.inf)


def test_nothing_released_tells_nobody_apart():
    curve = tradeoff([])
    np.testing.assert_allclose(curve(ALARMS), 1 - ALARMS, atol=1e-9)
    assert curve.mu == 0.0


def test_the_sentence_rounds_misses_down():
    said = tradeoff([Event.of(PoissonCohort(0.1), 1.2104, count=100)]).sentence()
    assert "attack misses at least 90.8 %; at 5 %, 75 %; at 10 %, 62.8 %" in said


def test_far_below_all_losses_no_point_is_computed_and_above_nothing_changes():
    probs, places = np.array([0.25, 0.5, 0.2]), np.arange(9)
    near = _deltas_at(places, 3, probs, 0.05, 0.1)
    far = MAX_WINDOW_POINTS**2
    shifted = _deltas_at(places + far, 3 + far, probs, 0.05, 0.1)
    np.testing.assert_allclose(shifted[3:], near[3:], rtol=1e-12)
    assert _deltas_at(np.array([0, 5]), 3 + far, probs, 0.05, 0.1).tolist() == [1.0, 1.0]
    # Every point up to this epsilon would take 20 GB.
    assert tradeoff([Event.of(PoissonCohort(0.2), 1.0, count=10**9)])(0.01) == 0.0

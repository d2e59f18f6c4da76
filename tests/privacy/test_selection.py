"""The best of a random number of runs: its price against oracles and exact leaks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.privacy import Event, ReleasePlan, selection_epsilon
from fedsim.privacy.laws import FixedSizeLaw, FullLaw, Law, PoissonLaw
from fedsim.privacy.laws.allocation import AllocationLaw
from fedsim.privacy.laws.cyclic import Cyclic
from fedsim.privacy.losses import ORDERS, rdp_epsilon
from fedsim.privacy.noise.banded import Banded

SAMPLED, ALONE = PoissonLaw(rate=0.01), FullLaw(adjacency="add-remove")


def epsilon(base: Law, rounds: int, z: float, distribution, mean: float) -> float:
    event = Event(noise_multiplier=z, law=base, count=rounds)
    return selection_epsilon([event], mean, 1e-5, distribution=distribution)


@pytest.mark.parametrize(
    ("base", "rounds", "z", "distribution", "expected"),
    [
        (SAMPLED, 1000, 1.1, "logarithmic", [2.3057, 2.6885, 2.9189, 3.3757, 3.5541]),
        (SAMPLED, 1000, 1.1, "geometric", [2.5145, 3.0829, 3.4328, 4.1301, 4.4010]),
        (SAMPLED, 1000, 1.1, "poisson", [2.1250, 2.7302, 3.6391, 9.5059, 13.570]),
        (ALONE, 1, 4.0, "logarithmic", [1.4184, 1.6505, 1.7841, 2.0358, 2.1299]),
        (ALONE, 1, 4.0, "geometric", [1.5795, 1.9397, 2.1537, 2.5628, 2.7162]),
        (ALONE, 1, 4.0, "poisson", [1.2966, 1.7141, 2.3538, 6.1260, 8.3872]),
    ],
)
def test_the_price_is_the_published_one(base, rounds, z, distribution, expected) -> None:
    found = [epsilon(base, rounds, z, distribution, mean) for mean in (2, 5, 10, 50, 100)]
    assert found == pytest.approx(expected, rel=2e-4)


def gamma_of(distribution, mean: float) -> float:
    """Parameter of the geometric or logarithmic distribution with this mean."""
    if distribution == "geometric":
        return 1 / mean
    return brentq(lambda gamma: (1 / gamma - 1) / math.log(1 / gamma) - mean, 1e-9, 1 - 1e-9)


@pytest.mark.parametrize("distribution", ["logarithmic", "geometric"])
@pytest.mark.parametrize("mean", [3.0, 20.0])
def test_the_price_is_that_of_the_theorem(distribution, mean) -> None:
    """Theorem 2 of Papernot and Steinke (2022), written again, on fedsim's own curve."""
    curve = 200 * PoissonLaw(rate=0.05).rdp(1.3)
    eta = 1 if distribution == "geometric" else 0
    second = (1 - 1 / ORDERS) * curve + math.log(1 / gamma_of(distribution, mean)) / ORDERS
    selected = curve + (1 + eta) * second.min() + math.log(mean) / (ORDERS - 1)
    found = epsilon(PoissonLaw(rate=0.05), 200, 1.3, distribution, mean)
    assert found == pytest.approx(rdp_epsilon(selected, 1e-5), rel=1e-6)


def leak(distribution, mean: float, z: float, at: float) -> float:
    """Delta at epsilon ``at`` of the best of K draws of one Gaussian, by a threshold on it.

    In closed form, by the generating function of K; 0 draws are among the smallest values.
    """

    def largest(shift: float) -> np.ndarray:
        """Distribution function of the largest draw."""
        below = norm.cdf(np.linspace(-12, 14, 200_001) - shift)
        if distribution == "poisson":
            return np.exp(mean * (below - 1))
        gamma = gamma_of(distribution, mean)
        p = 1 - gamma
        if distribution == "geometric":
            return gamma * below / (1 - p * below)
        return np.log1p(-p * below) / math.log1p(-p)

    without, present = largest(0.0), largest(1 / z)
    # Events above and below a threshold, in both directions.
    above = (1 - present) - math.exp(at) * (1 - without)
    below = without - math.exp(at) * present
    return max(above.max(), below.max())


@pytest.mark.parametrize("z", [4.0, 1.0])
@pytest.mark.parametrize("distribution", ["geometric", "poisson", "logarithmic"])
@pytest.mark.parametrize("mean", [2.0, 10.0, 50.0])
def test_no_price_is_below_what_a_selected_gaussian_leaks(z, distribution, mean) -> None:
    assert leak(distribution, mean, z, epsilon(ALONE, 1, z, distribution, mean)) <= 1e-5


@pytest.mark.parametrize(
    ("distribution", "mean", "z", "expected"),
    [
        ("geometric", 2.0, 4.0, 0.9684),
        ("geometric", 10.0, 4.0, 1.0606),
        ("geometric", 50.0, 4.0, 1.1463),
        ("poisson", 50.0, 4.0, 3.6147),
        ("geometric", 2.0, 1.0, 4.5362),
        ("geometric", 10.0, 1.0, 4.8865),
        ("geometric", 50.0, 1.0, 5.2141),
        ("poisson", 50.0, 1.0, 17.91),
    ],
)
def test_what_a_selected_gaussian_leaks_is_the_published_figure(
    distribution, mean, z, expected
) -> None:
    found = brentq(
        lambda at: leak(distribution, mean, z, at) - 1e-5, 0.5 * expected, 1.2 * expected
    )
    assert found == pytest.approx(expected, rel=1e-3)


def test_orders_that_cannot_be_computed_are_left_out_without_a_word(caplog) -> None:
    assert epsilon(PoissonLaw(rate=0.1), 50, 0.803, "logarithmic", 7.0) == pytest.approx(12.7, 0.01)
    assert not caplog.records


def test_a_plan_of_correlated_rounds_and_one_without_noise_have_their_price() -> None:
    plan = ReleasePlan(
        level="client",
        sampler=Cyclic(4, population=100),
        mechanism=Clipping(1.0),
        noise=Banded(6.0),
        rounds=12,
    )
    event = plan.event().over_rounds(12)
    z = 6.0 / event.law.sensitivity
    assert selection_epsilon([event], 5, 1e-5) == pytest.approx(
        epsilon(ALONE, 1, z, "logarithmic", 5)
    )
    assert selection_epsilon([Event(noise_multiplier=0.0)], 5, 1e-5) == math.inf


@pytest.mark.parametrize(
    ("law", "mean", "distribution", "words"),
    [
        (ALONE, 1.0, "geometric", "the mean number of runs is 1; it must be above 1"),
        (ALONE, math.inf, "poisson", "the mean number of runs is inf"),
        (ALONE, 3.0, "uniform", "must be 'logarithmic', 'geometric' or 'poisson'"),
        (FixedSizeLaw(size=3, population=9), 3.0, "poisson", "known for Poisson sampling and"),
        (AllocationLaw(participations=2, rounds=8), 3.0, "poisson", "2 of 8 rounds, at random"),
    ],
)
def test_what_has_no_known_price_is_refused(law, mean, distribution, words) -> None:
    with pytest.raises(FedsimError, match=words):
        epsilon(law, 1, 2.0, distribution, mean)

"""Random allocation: its law against brackets and simulations, its draws, its plans."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import logsumexp
from slow_cases import slow_but

from fedsim.cohorts import AllocationCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Event, calibrate, epsilon
from fedsim.privacy.laws import Poisson
from fedsim.privacy.laws.allocation import AllocationLaw, _added_rdp
from fedsim.privacy.losses import ORDERS, gaussian_epsilon
from fedsim.privacy.noise import Independent
from fedsim.privacy.noise.banded import Banded
from fedsim.privacy.plan import ReleasePlan
from fedsim.privacy.pld import composed_epsilon
from fedsim.randomness import Draws, Randomness


@pytest.mark.parametrize(
    ("rounds", "z", "delta", "least", "most", "added", "poisson"),
    slow_but(
        3,
        [
            (10, 1.0, 1e-5, 2.1865, 2.1912, 1.3696, 2.8545),
            (10, 1.0, 1e-6, 2.6503, 2.6546, 1.5482, 3.4660),
            (100, 1.0, 1e-5, 0.6135, 0.6283, 0.4308, 0.7180),
            (100, 1.0, 1e-6, 0.8516, 0.8643, 0.4953, 0.9542),
            (100, 0.5, 1e-5, 5.3927, 5.4003, 1.3499, 6.4762),
            (1000, 0.7, 1e-5, 0.5333, 0.6448, 0.3041, 0.6097),
        ],
    ),
)
def test_one_of_so_many_rounds_costs_what_brackets_say(
    rounds, z, delta, least, most, added, poisson
) -> None:
    cohort = AllocationCohort(1, rounds)
    found = epsilon(noise_multiplier=z, cohort=cohort, rounds=rounds, delta=delta)
    assert least <= found <= most
    _, pair = cohort.law().pairs(z)
    assert composed_epsilon({(pair, pair): 1}, delta) <= added
    sampled = epsilon(noise_multiplier=z, cohort=Poisson(1 / rounds), rounds=rounds, delta=delta)
    assert sampled == pytest.approx(poisson, abs=2e-3)
    assert found < sampled
    accountant = Accountant([Event(noise_multiplier=z, law=cohort.law())])
    assert accountant.cost(delta).rdp_epsilon >= found


@pytest.mark.parametrize("z", [0.01, 0.04, 0.05, 0.1, 0.3, 1e5])
def test_little_and_much_noise_cost_at_most_a_known_round(z) -> None:
    rounds, delta = 10, 1e-9
    found = Accountant([Event(noise_multiplier=z, law=AllocationLaw(rounds=rounds))]).epsilon(delta)
    known = gaussian_epsilon(1 / z, delta)
    # The mean S of the rounds' density ratios is at least a tenth of the known round's.
    assert known - math.log(rounds) <= found <= known


@pytest.mark.parametrize(("rounds", "z"), [(10, 1.0), (100, 0.5)])
def test_the_profile_is_that_of_simulated_rounds(rounds, z) -> None:
    accountant = Accountant([Event(noise_multiplier=z, law=AllocationLaw(rounds=rounds))])
    generator = np.random.default_rng(4)
    noise = generator.normal(size=(200_000, rounds)) * z
    noise[:, 0] += 1
    losses = np.log(np.exp(noise / z**2 - 1 / (2 * z**2)).mean(axis=1))
    for at in (0.5, 1.0):
        excess = np.maximum(0.0, -np.expm1(at - losses))
        error = excess.std() / math.sqrt(len(excess))
        # An upper bound that is wider than the truth by less than 1 %.
        assert (
            -5 * error <= accountant.delta(at) - excess.mean() <= 5 * error + 0.01 * excess.mean()
        )


def test_four_of_twenty_rounds_are_four_times_one_of_five() -> None:
    law = AllocationLaw(participations=4, rounds=20)
    found = Accountant([Event(noise_multiplier=2.0, law=law, count=4)])
    exact = {0.5: 4.264e-2, 1.0: 4.423e-3, 1.5: 1.906e-4}
    most = {0.5: 4.696e-2, 1.0: 5.224e-3, 1.5: 2.448e-4}
    for at, delta in exact.items():
        assert delta < found.delta(at) < most[at]


@pytest.mark.parametrize(("k", "rounds", "z"), [(3, 10, 2.0), (3, 11, 1.2), (4, 7, 3.0)])
def test_a_number_of_rounds_that_is_no_multiple_costs_no_less_than_simulated(k, rounds, z) -> None:
    law = AllocationLaw(participations=k, rounds=rounds)
    accountant = Accountant([Event(noise_multiplier=z, law=law, count=k)])
    noise = np.random.default_rng(7).normal(size=(200_000, rounds)) * z
    noise[:, :k] += 1  # in which rounds does not matter: all choices are equally likely
    ratios = np.exp(noise / z**2 - 1 / (2 * z**2))
    # The mean over all choices of k rounds: an elementary symmetric polynomial.
    sums = np.zeros((k + 1, len(noise)))
    sums[0] = 1
    for column in ratios.T:
        sums[1:] += sums[:-1] * column
    losses = np.log(sums[k] / math.comb(rounds, k))
    for at in (0.5, 1.0, 1.5):
        excess = np.maximum(0.0, -np.expm1(at - losses))
        assert accountant.delta(at) >= excess.mean() - 5 * excess.std() / math.sqrt(len(excess))
    # The bound is that of floor(rounds / k), and not wider than a Gaussian in every one of k.
    assert accountant.epsilon(1e-5) <= gaussian_epsilon(math.sqrt(k) / z, 1e-5)


def test_a_client_is_once_in_each_block_at_the_cost_of_its_parts() -> None:
    drawn = cohorts(3000, 3, 12, blocks=True)
    for block in range(3):
        together = np.concatenate(drawn[4 * block : 4 * block + 4])
        assert np.array_equal(np.sort(together), np.arange(3000))
    # Binomial(3000, 1/4) in each round: a standard deviation of 23.7.
    assert all(abs(len(ids) - 750) < 5 * 23.7 for ids in drawn)
    settings = {"noise_multiplier": 1.5, "rounds": 12, "delta": 1e-5}
    blocks = epsilon(cohort=AllocationCohort(3, 12, blocks=True), **settings)
    assert blocks == epsilon(cohort=AllocationCohort(3, 12), **settings)
    law = AllocationCohort(3, 12, blocks=True).law()
    assert "in one of each 4 rounds" in law.sentence("client")
    event = Event(noise_multiplier=1.5, law=law, count=3)
    assert Event.from_dict(event.to_dict()) == event
    with pytest.raises(FedsimError, match="it must divide the run's rounds, 10"):
        AllocationCohort(3, 10, blocks=True)


@pytest.mark.parametrize("many", [1, 3, 7])
def test_every_round_is_the_unamplified_gaussian(many) -> None:
    cohort = AllocationCohort(many, many)
    found = epsilon(noise_multiplier=2.0, cohort=cohort, rounds=many, delta=1e-5)
    assert found == pytest.approx(gaussian_epsilon(math.sqrt(many) / 2, 1e-5))


def test_renyi_divergences_are_those_of_independent_lognormal_numbers() -> None:
    # Of order 2, E S^2 = 1 + (exp(1 / z^2) - 1) / t.
    for among, z in ((5, 1.0), (40, 0.8), (1, 1.3)):
        found = AllocationLaw(rounds=among).rdp(z)[list(ORDERS).index(2.0)]
        assert found == pytest.approx(math.log1p(math.expm1(1 / z**2) / among), rel=1e-9)


def cohorts(
    population: int, participations: int = 3, rounds: int = 10, *, blocks: bool = False
) -> list[np.ndarray]:
    sampler = AllocationCohort(participations, rounds, population, blocks)
    draws = Draws(Randomness(5), level="client", amplified=True)
    drawn = []
    for number in range(1, rounds + 1):
        if number == 5:  # resumed in the middle
            resumed = AllocationCohort(participations, rounds, population, blocks)
            resumed.restore(sampler.state())
            sampler = resumed
        drawn.append(sampler.draw(number, draws))
    return drawn


def test_each_client_is_in_exactly_so_many_rounds_and_moves_no_other() -> None:
    drawn = cohorts(5000)
    counts = np.bincount(np.concatenate(drawn), minlength=5000)
    assert (counts == 3).all()
    sizes = np.array([len(ids) for ids in drawn])
    # Binomial(5000, .3): a standard deviation of 32.4.
    assert (np.abs(sizes - 1500) < 5 * 32.4).all()
    inside = np.zeros((10, 5000))
    for row, ids in zip(inside, drawn, strict=True):
        row[ids] = 1
    # Any two rounds of a client are in with k (k - 1) / (T (T - 1)).
    together = (inside @ inside.T / 5000)[~np.eye(10, dtype=bool)]
    assert together == pytest.approx(np.full(90, 6 / 90), abs=5 * math.sqrt(6 / 90 / 5000))
    more = cohorts(5001)
    assert all(np.array_equal(a, b[b < 5000]) for a, b in zip(drawn, more, strict=True))


def test_a_plan_is_charged_with_its_first_round_and_its_rounds_are_drawn_in_turn() -> None:
    cohort = AllocationCohort(2, 12, 100)
    plan = ReleasePlan(
        level="client", sampler=cohort, mechanism=Gaussian(), noise=Independent(1.0), rounds=12
    )
    assert [plan.charge(t).count for t in range(1, 13)] == [2] + 11 * [0]
    assert plan.denominator == pytest.approx(100 / 6)
    assert plan.closed
    assert cohort.horizon == 12
    assert PoissonCohort(0.1, 100).horizon is None
    expected = epsilon(noise_multiplier=1.0, cohort=cohort, rounds=12, delta=1e-5)
    assert plan.epsilon(1e-5) == plan.epsilon(1e-5, after_round=3) == expected
    event = plan.charge(1)
    assert Event.from_dict(event.to_dict()) == event
    # A round that is made once more is one plain Gaussian more.
    again = Accountant([event, plan.charge(3, redrawn=True)]).epsilon(1e-5)
    assert expected < again < Accountant([Event(noise_multiplier=1.0, count=3)]).epsilon(1e-5)
    z = calibrate(target_epsilon=2.0, cohort=cohort, rounds=12, delta=1e-5)
    assert 1.99 < epsilon(noise_multiplier=z, cohort=cohort, rounds=12, delta=1e-5) <= 2.0
    draws = Draws(Randomness(1), level="client", amplified=True)
    cohort.draw(1, draws)
    with pytest.raises(FedsimError, match="must be drawn once each, in turn"):
        cohort.draw(1, draws)
    with pytest.raises(FedsimError, match="at most the run's rounds, 4"):
        AllocationCohort(5, 4, 100)


def test_noise_that_is_correlated_counts_on_no_more_participations() -> None:
    plan = ReleasePlan(
        level="client",
        sampler=AllocationCohort(1, 30, 100),
        mechanism=Gaussian(),
        noise=Banded(1.0, bands=8),
        rounds=30,
    )
    assert isinstance(plan.noise, Banded)
    assert plan.event().law.sensitivity == pytest.approx(plan.noise.column_norm)  # type: ignore[attr-defined]
    assert plan.event().law.rate == 1


class Gaussian:
    guarantee = "gaussian"


@pytest.mark.parametrize("z", [0.5, 1.0, 2.0, 5.0, 30.0])
def test_the_curve_of_an_added_row_is_above_an_integral_over_two_rounds(z: float) -> None:
    chosen = np.arange(0, len(ORDERS), 6)
    noise = np.linspace(-40.0, 40.0, 801)  # in standard deviations
    weight = -(noise**2) / 2 + math.log((noise[1] - noise[0]) / math.sqrt(2 * math.pi))
    term = noise / z - 1 / (2 * z**2)
    mean = np.logaddexp.outer(term, term).ravel() - math.log(2)
    weights = np.add.outer(weight, weight).ravel()
    powers = ORDERS[chosen] - 1
    truth = np.array([logsumexp(weights - power * mean) / power for power in powers])
    found = _added_rdp(2, z)[chosen]
    assert (truth <= found).all()
    # Tight where the grid reaches, and at the least orders, which most deltas take.
    assert found[:6] == pytest.approx(truth[:6], rel=1e-3)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("participations", "rounds", "expected"), [(2, 20, 2.9432), (10, 100, 7.5113), (4, 4, 4.3772)]
)
def test_known_rounds_cost_one_gaussian_each(participations, rounds, expected, blocks) -> None:
    plan = ReleasePlan(
        level="client",
        sampler=AllocationCohort(participations, rounds, 100, blocks=blocks),
        mechanism=Gaussian(),
        noise=Independent(2.0),
        rounds=rounds,
        cohort_known=True,
    )
    assert not plan.amplified
    spent = Accountant([plan.charge(t) for t in range(1, rounds + 1)]).epsilon(1e-5)
    assert plan.epsilon(1e-5) == spent == pytest.approx(expected, abs=1e-4)
    event = plan.charge(1)
    assert Event.from_dict(event.to_dict()) == event

"""Plans whose rounds are charged together, and the cohorts that they count on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.errors import FedsimError
from fedsim.privacy import Entry, Ledger, epsilon
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.calibration import rounds_within
from fedsim.privacy.entry import History
from fedsim.privacy.events import Event
from fedsim.privacy.laws import Full, Participation, Poisson
from fedsim.privacy.laws.correlated import CorrelatedLaw
from fedsim.privacy.laws.cyclic import Cyclic
from fedsim.privacy.laws.separated import Separated
from fedsim.privacy.losses import gaussian_epsilon
from fedsim.privacy.noise import Independent, Noise
from fedsim.privacy.noise.lambda_cgd import LambdaCGD
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Draws, Randomness


@dataclass(frozen=True)
class Bounded:
    guarantee: str = "gaussian"


def plan_of(sampler, noise: Noise, rounds: int) -> ReleasePlan:
    return ReleasePlan(
        level="client", sampler=sampler, mechanism=Bounded(), noise=noise, rounds=rounds
    )


@pytest.mark.parametrize(
    ("rounds", "separation", "best", "sensitivity"),
    [(100, 10, 0.795, 5.706108), (1000, 100, 0.953, 10.514053)],
)
def test_lambda_is_the_best_for_the_plan(rounds, separation, best, sensitivity) -> None:
    participation = Participation(rounds, separation)
    noise = LambdaCGD(1.0).fit(participation)
    assert float(noise.coefficients) == best
    assert noise.sensitivity(participation) == pytest.approx(sensitivity, rel=1e-6)


@given(st.floats(0, 0.99), st.integers(1, 8), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_no_row_moves_the_plan_further_than_it_says(number, rounds, separation, seed) -> None:
    participation, places = Participation(rounds, separation), range(rounds)
    noise = LambdaCGD(1.0, coefficients=repr(number)).fit(participation)
    series = noise.series(rounds)
    matrix = np.array([[series[i - j] if i >= j else 0.0 for j in places] for i in places])
    patterns = [
        chosen
        for size in range(1, participation.participations + 1)
        for chosen in combinations(range(rounds), size)
        if all(b - a >= separation for a, b in pairwise(chosen))
    ]
    worst = max(np.linalg.norm(matrix[:, list(chosen)].sum(axis=1)) for chosen in patterns)
    assert noise.sensitivity(participation) == pytest.approx(worst, rel=1e-9)
    rows = np.random.default_rng(seed).normal(size=(rounds, 3))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    for chosen in patterns[:50]:
        moved = matrix[:, list(chosen)] @ rows[list(chosen)]
        assert np.linalg.norm(moved) <= worst * (1 + 1e-9)
        # A round that is made once more is a row of the matrix more.
        once_more = np.linalg.norm(matrix[chosen[-1], list(chosen)] @ rows[list(chosen)])
        assert once_more <= noise.repeat_sensitivity(participation) * (1 + 1e-9)


def test_a_plan_is_one_gaussian_charged_with_its_first_round() -> None:
    plan = plan_of(Cyclic(10, population=100), LambdaCGD(2.0), 100)
    mu = plan.noise.sensitivity(Participation(100, 10)) / 2.0
    assert plan.epsilon(1e-5) == pytest.approx(gaussian_epsilon(mu, 1e-5))
    charges = [plan.charge(number) for number in range(1, 101)]
    assert Accountant(charges).epsilon(1e-5) == pytest.approx(plan.epsilon(1e-5))
    assert Accountant(charges[:1]).epsilon(1e-5) == pytest.approx(plan.epsilon(1e-5))
    for event in (charges[0], charges[1], plan.charge(3, redrawn=True)):
        assert Event.from_dict(event.to_dict()) == event
    calibrated = plan.calibrated(3.0, 1e-5)
    assert 2.999 < calibrated.epsilon(1e-5) <= 3.0
    # Plans of one participation are the same whatever bounds it.
    every = plan_of(Full(100), Independent(2.0), 100)
    assert plan_of(Full(100), LambdaCGD(2.0, coefficients="0"), 100).epsilon(1e-5) == pytest.approx(
        every.epsilon(1e-5)
    )


def test_a_plan_that_releases_may_end_is_charged_before_its_first_round() -> None:
    plan = plan_of(Cyclic(5, population=100), LambdaCGD(2.0), 20)
    stops = replace(plan, may_stop=True)
    assert stops.closed
    for one, rounds in (
        (stops, 20),
        (replace(plan_of(Cyclic(5, population=100), Independent(2.0), 20), may_stop=True), 20),
        (replace(plan_of(Poisson(0.1, 100), Independent(2.0), 7), may_stop=True), 7),
    ):
        charged = History(Entry(event=one.charge(t)) for t in range(1, rounds + 1))
        assert charged.accountant.epsilon(1e-5) == pytest.approx(one.epsilon(1e-5))
        first = History([Entry(event=one.charge(1))])
        assert first.accountant.epsilon(1e-5) == pytest.approx(one.epsilon(1e-5))
        assert one.charged_ahead
        assert one.epsilon(1e-5, after_round=3) < one.epsilon(1e-5)
        # A round that is drawn again costs one more release.
        assert first.accountant_with(Entry(event=one.charge(1, redrawn=True))).epsilon(
            1e-5
        ) > one.epsilon(1e-5)
    with pytest.raises(FedsimError, match="may_stop is True, and the plan has no number of rounds"):
        replace(plan_of(Poisson(0.1, 100), Independent(2.0), 7), rounds=None, may_stop=True)


def test_groups_in_turn_cost_one_sampled_gaussian_in_as_many_rounds() -> None:
    cohort = Cyclic(10, 0.2, population=1000)
    found = epsilon(noise_multiplier=1.0, cohort=cohort, rounds=95, delta=1e-5)
    ten = epsilon(noise_multiplier=1.0, cohort=Poisson(0.2), rounds=10, delta=1e-5)
    assert found == pytest.approx(ten)
    assert rounds_within(max_epsilon=ten, noise_multiplier=1.0, cohort=cohort, delta=1e-5) == 100
    assert cohort.expected_size == 20
    far = epsilon(noise_multiplier=1.0, cohort=Separated(10, 0.2), rounds=95, delta=1e-5)
    assert far == pytest.approx(gaussian_epsilon(10**0.5, 1e-5))


@pytest.mark.parametrize("cohort", [Cyclic, Separated])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_nobody_is_in_two_of_so_many_rounds_also_after_a_resume(cohort, rate) -> None:
    draws = Draws(Randomness(None), level="client", amplified=True)
    sampler, b = cohort(4, rate, population=3000), 4
    drawn = [sampler.draw(number, draws) for number in range(1, 9)]
    resumed = cohort(4, rate, population=3000)
    resumed.restore(sampler.state())
    drawn += [resumed.draw(number, draws) for number in range(9, 25)]
    for number, ids in enumerate(drawn):
        assert np.array_equal(ids, np.unique(ids))
        for earlier in drawn[max(0, number - b + 1) : number]:
            assert not np.intersect1d(ids, earlier).size
    expected = sampler.expected_size
    # The standard deviation of a mean of 24 sizes is below sqrt(expected / 24).
    assert np.mean([len(ids) for ids in drawn]) == pytest.approx(expected, abs=4 * expected**0.5)
    assert len(drawn[0]) == pytest.approx(expected, abs=5 * expected**0.5)


def test_a_limit_of_participations_holds_after_a_resume_and_lowers_the_sensitivity() -> None:
    draws = Draws(Randomness(3), level="client", amplified=True)
    sampler = Separated(3, 0.5, population=500, max_participations=2)
    drawn = [sampler.draw(number, draws) for number in range(1, 9)]
    resumed = replace(sampler)
    resumed.restore(sampler.state())
    drawn += [resumed.draw(number, draws) for number in range(9, 31)]
    counts = np.bincount(np.concatenate(drawn), minlength=500)
    assert counts.max() == 2
    assert (counts == 2).mean() > 0.99
    # Until somebody has taken part twice the limit changes nothing.
    free, fresh = (
        Separated(3, 0.5, population=500),
        Draws(Randomness(3), level="client", amplified=True),
    )
    assert all(np.array_equal(free.draw(n, fresh), drawn[n - 1]) for n in (1, 2, 3))
    limited, usual = (
        plan_of(replace(sampler, max_participations=most), LambdaCGD(4.0, coefficients="0.5"), 30)
        for most in (2, 0)
    )
    assert limited.noise.known_participation.participations == 2
    # Rows 3 rounds apart of a series .5^j: |c + shifted c|^2 = 4/3 (2 + 2 / 8), but for the end.
    assert limited.event().law.sensitivity == pytest.approx(3**0.5, rel=1e-6)
    assert limited.epsilon(1e-5) < usual.epsilon(1e-5)


@pytest.mark.parametrize("cohort", [Cyclic, Separated])
def test_one_client_more_moves_no_other(cohort) -> None:
    def drawn(population: int) -> list[list[int]]:
        draws = Draws(Randomness(7), level="client", amplified=True)
        sampler = cohort(3, 0.5, population=population)
        rounds = [sampler.draw(number, draws).tolist() for number in range(1, 13)]
        return [[client for client in ids if client < 40] for ids in rounds]

    assert drawn(41) == drawn(40)


def test_a_line_counts_nothing_only_after_one_that_covers_it(tmp_path) -> None:
    plan = plan_of(Cyclic(5, population=100), LambdaCGD(2.0), 20)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(FedsimError, match="round 2 counts 0, and no earlier line"):
        ledger.record(Entry(round=2, event=plan.charge(2)))
    ledger.record(Entry(round=1, event=plan.charge(1)))
    ledger.record(Entry(round=2, event=plan.charge(2)))
    assert len(Ledger.read(tmp_path / "ledger.jsonl").entries) == 2
    other = plan_of(Cyclic(5, population=100), LambdaCGD(1.0), 20)
    with pytest.raises(FedsimError, match="round 3 counts 0"):
        ledger.record(Entry(round=3, event=other.charge(3)))


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(FedsimError, match="separation is 0"):
        Participation(3, 0)
    with pytest.raises(FedsimError, match="sensitivity is 0"):
        CorrelatedLaw(sensitivity=0.0)
    with pytest.raises(FedsimError, match="has no plan"):
        LambdaCGD(1.0).law(Full(9).law())
    assert plan_of(Full(9), LambdaCGD(1.0), 1).event().law.rounds == 1

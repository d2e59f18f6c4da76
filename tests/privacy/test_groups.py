"""What an owner of several rows is promised, against closed forms, quadrature and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import logsumexp, ndtr
from scipy.stats import binom, norm
from slow_cases import slow_but

from fedsim.cohorts import FullCohort
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.privacy import (
    Accountant,
    Entry,
    Event,
    Independent,
    Ledger,
    ReleasePlan,
    group_epsilon,
)
from fedsim.privacy.laws import FixedSizeLaw, FullLaw, PoissonLaw
from fedsim.privacy.losses import gaussian_epsilon

DELTA = 1e-5


def gaussian_delta(mu: float, epsilon: float) -> float:
    return ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(("adjacency", "moved"), [("zero-out", 1), ("replace-one", 2)])
def test_without_sampling_a_group_is_one_gaussian_of_its_size(size, adjacency, moved) -> None:
    event = Event(noise_multiplier=20.0, law=FullLaw(adjacency=adjacency), count=40)
    epsilon = group_epsilon([event], size, DELTA)
    mu = size * moved * math.sqrt(40) / 20
    assert gaussian_delta(mu, epsilon) == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.slow
def test_a_group_of_one_is_a_row() -> None:
    events = [Event(noise_multiplier=1.1, law=PoissonLaw(rate=0.05), count=50)]
    assert group_epsilon(events, 1, DELTA) == pytest.approx(
        Accountant(events).epsilon(DELTA), rel=2e-3
    )


def losses(x: np.ndarray, size: int, q: float, z: float) -> np.ndarray:
    """log of the mixture over how many of the group take part, over nobody's, at ``x``."""
    drawn = np.arange(size + 1)
    weights = binom.logpmf(drawn, size, q)
    return logsumexp(weights + (2 * drawn * x[:, None] - drawn**2) / (2 * z**2), axis=1)


@pytest.mark.parametrize(
    ("size", "q", "z"), slow_but(1, [(3, 0.5, 2.0), (2, 0.1, 1.0), (4, 0.05, 2.0)])
)
def test_one_poisson_sample_is_the_mixture_over_who_takes_part(size, q, z) -> None:
    delta = 1e-3
    epsilon = group_epsilon([Event(noise_multiplier=z, law=PoissonLaw(rate=q))], size, delta)
    x = np.linspace(-14 * z, size + 14 * z, 400_001)
    loss = losses(x, size, q, z)
    nobody = norm.logpdf(x, scale=z)
    removed = np.trapezoid(np.exp(nobody) * np.maximum(np.exp(loss) - np.exp(epsilon), 0), x)
    added = np.trapezoid(np.exp(nobody) * np.maximum(1 - np.exp(epsilon + loss), 0), x)
    assert max(removed, added) == pytest.approx(delta, rel=5e-3)


@pytest.mark.slow
def test_many_poisson_samples_compose_as_simulated() -> None:
    """delta at the claimed epsilon, by simulation: 5 standard errors."""
    size, q, z, rounds, delta = 3, 0.1, 1.5, 30, 0.05
    event = Event(noise_multiplier=z, law=PoissonLaw(rate=q), count=rounds)
    epsilon = group_epsilon([event], size, delta)
    generator = np.random.default_rng(0)
    total, trials = np.zeros(40_000), 40_000
    for _ in range(rounds):
        x = generator.binomial(size, q, trials) + z * generator.standard_normal(trials)
        total += losses(x, size, q, z)
    seen = np.maximum(1 - np.exp(epsilon - total), 0)
    assert abs(seen.mean() - delta) < 5 * seen.std() / math.sqrt(trials) + 1e-3


@pytest.mark.slow
def test_the_chain_of_neighbours_holds_for_fixed_cohorts_and_is_never_better() -> None:
    fixed = Event(noise_multiplier=4.0, law=FixedSizeLaw(size=10, population=100), count=20)
    epsilon = group_epsilon([fixed], 3, DELTA)
    assert epsilon > 3 * Accountant([fixed]).epsilon(DELTA)
    # (k e, (e^(k e) - 1) / (e^e - 1) d) follows from (e, d).
    one = epsilon / 3
    grown = math.expm1(epsilon) / math.expm1(one)
    assert Accountant([fixed]).delta(one) * grown <= DELTA * (1 + 1e-9)
    poisson = [Event(noise_multiplier=2.0, law=PoissonLaw(rate=0.1), count=10)]
    chained = group_epsilon(poisson, 2, DELTA, chained=True)
    assert group_epsilon(poisson, 2, DELTA) < chained < math.inf


@pytest.mark.slow
def test_more_rows_are_promised_less_and_no_noise_nothing() -> None:
    events = [Event(noise_multiplier=2.0, law=PoissonLaw(rate=0.1), count=10)]
    epsilons = [group_epsilon(events, size, DELTA) for size in (1, 2, 4)]
    assert epsilons == sorted(epsilons)
    silent = group_epsilon([Event(noise_multiplier=0.0, law=PoissonLaw())], 2, DELTA)
    assert silent == math.inf
    with pytest.raises(FedsimError, match="a group has 0 rows; it must have 1 or more"):
        group_epsilon(events, 0, DELTA)


def test_a_runs_ledger_says_what_an_owner_of_several_clients_is_promised(tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for number in (1, 2):
        ledger.record(Entry(round=number, event=Event(noise_multiplier=8.0), clip_norm=1.0))
    events = [entry.event for entry in Ledger.read(ledger.path).entries]
    expected = gaussian_epsilon(3 * math.sqrt(2) / 8, DELTA)
    assert group_epsilon(events, 3, DELTA) == pytest.approx(expected)
    plan = ReleasePlan(
        level="client",
        sampler=FullCohort(20),
        mechanism=Clipping(1.0),
        noise=Independent(8.0),
        rounds=2,
    )
    assert group_epsilon([plan.event().over_rounds(2)], 3, DELTA) == pytest.approx(expected)


def test_samplers_that_fedsim_does_not_ship_are_chained() -> None:
    class Mine(PoissonLaw):
        name = "mine"

    event = Event(noise_multiplier=2.0, law=Mine(rate=0.1), count=10)
    assert group_epsilon([event], 2, DELTA) == group_epsilon([event], 2, DELTA, chained=True)

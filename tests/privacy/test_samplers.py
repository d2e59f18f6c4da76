from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import slow_but

from fedsim.cohorts import FixedCohort, FullCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.privacy import Event
from fedsim.privacy.laws import (
    FixedSize,
    Full,
    InclusionSampler,
    Poisson,
    Sampler,
    ShuffledPasses,
    poisson,
)
from fedsim.privacy.laws.poisson import draw_poisson
from fedsim.privacy.laws.shuffle import draw_passes
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Address, Draws, Randomness


def draws(seed: int) -> Draws:
    return Draws(Randomness(seed), level="client", amplified=True)


def drawn(sampler: Sampler, rounds: int, seed: int = 5) -> npt.NDArray[np.bool_]:
    """Who was in, ``[rounds, population]``."""
    assert sampler.population is not None
    inside = np.zeros((rounds, sampler.population), dtype=bool)
    for t in range(rounds):
        inside[t, sampler.draw(t, draws(seed))] = True
    return inside


class Weighted(InclusionSampler):
    """Client i is in every other round with probability ``(i + 1) / (2 n)``, else ``1 / 2``."""

    def probabilities(self, round: int) -> npt.NDArray[np.float64]:
        even = round % 2 == 0
        return (
            np.arange(1, self.population + 1) / (2 * self.population)
            if even
            else np.full(self.population, 0.5)
        )


SAMPLERS = [
    lambda n: Poisson(0.3, n),
    lambda n: FixedSize(max(1, n // 3), n),
    lambda n: Full(n),
    lambda n: ShuffledPasses(max(1, n // 3), n),
    lambda n: Weighted(n, 0.5),
]


@given(st.integers(0, 10**6), st.integers(0, 100), st.integers(1, 200), st.sampled_from(SAMPLERS))
def test_a_draw_is_a_function_of_its_round_and_draws_nobody_twice(seed, round, population, make):
    first = make(population).draw(round, draws(seed), 2)
    again = make(population).draw(round, draws(seed), 2)
    assert first.dtype == np.int64
    assert np.array_equal(first, again)
    assert len(np.unique(first)) == len(first)
    assert not len(first) or (first.min() >= 0 and first.max() < population)


@given(st.integers(0, 10**6), st.integers(0, 100), st.integers(1, 300), st.floats(0.001, 1))
def test_a_new_last_client_moves_nobody_else_under_poisson_and_full(seed, round, population, rate):
    for make in (lambda n: Poisson(rate, n), Full):
        before = make(population).draw(round, draws(seed)).tolist()
        after = make(population + 1).draw(round, draws(seed)).tolist()
        assert after in (before, [*before, population])


def within(values: npt.ArrayLike, mean: npt.ArrayLike, std: npt.ArrayLike, sds: float) -> bool:
    return bool((np.abs(np.asarray(values) - mean) <= sds * np.asarray(std)).all())


@pytest.mark.parametrize(
    ("sampler", "p"),
    slow_but(
        3,
        [
            (Poisson(0.04, 60), np.full(60, 0.04)),
            (FixedSize(7, 60), np.full(60, 7 / 60)),
            (ShuffledPasses(7, 60), np.full(60, 7 / 60)),
            (Poisson(0.5, 60), np.full(60, 0.5)),
            (Poisson(0.93, 60), np.full(60, 0.93)),
            (FixedSize(58, 60), np.full(60, 58 / 60)),
            (Weighted(60, 0.5), (np.arange(1, 61) / 120 + 0.5) / 2),
        ],
    ),
    ids=str,
)
def test_everybody_is_in_as_often_as_the_rate_says(sampler, p):
    rounds = 6000
    often = drawn(sampler, rounds).mean(axis=0)
    # 60 frequencies at 4.5 standard deviations: a false alarm in 2,400 runs.
    assert within(often, p, np.sqrt(p * (1 - p) / rounds), 4.5)


@pytest.mark.parametrize(
    ("sampler", "covariance"),
    slow_but(
        3,
        [
            (Poisson(0.3, 40), 0.0),
            # Without replacement two are in together with probability k (k - 1) / (n (n - 1)).
            (FixedSize(12, 40), -0.3 * 0.7 / 39),
            (ShuffledPasses(12, 40), -0.3 * 0.7 / 39),
            (Weighted(40, 0.5), None),
        ],
    ),
    ids=str,
)
def test_pairs_are_in_together_as_the_law_says(sampler, covariance):
    rounds = 8000
    inside = drawn(sampler, rounds)[::2]  # of Weighted, the rounds of unequal probabilities
    p = inside.mean(axis=0)
    both = np.cov(inside.T, bias=True)[np.triu_indices(40, 1)]
    std = np.sqrt(np.outer(p * (1 - p), p * (1 - p))[np.triu_indices(40, 1)] / len(inside))
    assert within(both, covariance or 0.0, std, 5.5)


@pytest.mark.parametrize(
    "sampler", [Poisson(0.3, 40), FixedSize(12, 40), Weighted(40, 0.5)], ids=str
)
def test_rounds_are_independent_of_each_other(sampler):
    rounds = 4000
    inside = drawn(sampler, rounds).astype(float)[::2]
    p = inside.mean(axis=0)
    for lag in (1, 2, 7):
        products = (inside[:-lag] - p) * (inside[lag:] - p)
        std = p * (1 - p) / math.sqrt(len(products))
        assert within(products.mean(axis=0), 0, std, 5)


@pytest.mark.parametrize(("rate", "population"), [(0.2, 500), (0.003, 2000), (0.9, 100)])
def test_sizes_of_poisson_samples_are_binomial(rate, population):
    rounds = 3000
    sizes = drawn(Poisson(rate, population), rounds, seed=7).sum(axis=1)
    std = math.sqrt(population * rate * (1 - rate))
    assert within(sizes.mean(), rate * population, std / math.sqrt(rounds), 5)
    kurtosis = 3 + (1 - 6 * rate * (1 - rate)) / std**2
    assert within(sizes.var() / std**2, 1, math.sqrt((kurtosis - 1) / rounds), 5)


def test_gaps_between_those_in_a_poisson_sample_are_geometric():
    # An implementation of its own: one uniform number for each of a million.
    ids = Poisson(0.01, 10**6).draw(1, draws(3))
    gaps = np.diff(ids)
    counts = np.bincount(np.minimum(gaps, 300), minlength=301)[1:]
    k = np.arange(1, 301)
    p = 0.01 * 0.99 ** (k - 1)
    p[-1] = 0.99**299
    expected = len(gaps) * p
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 299 degrees of freedom, 5 standard deviations.
    assert within(chi_square, 299, math.sqrt(2 * 299), 5)


class Counting:
    """Draws that count the numbers taken."""

    taken = 0

    def generator(self, round: int, part: int = 0) -> Counting:
        self.numbers = np.random.default_rng(round)
        return self

    def generators(self, round: int, parts: range) -> Iterator[Counting]:
        return (self.generator(round, part) for part in parts)

    def geometric(self, rate: float, size: int) -> npt.NDArray[np.int64]:
        self.taken += size
        return self.numbers.geometric(rate, size)

    def integers(self, above: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        self.taken += len(above)
        return self.numbers.integers(above)


@pytest.mark.parametrize("sampler", [Poisson(1e-7, 10**9), FixedSize(100, 10**9)], ids=str)
def test_a_draw_costs_what_it_draws_and_not_the_population(sampler):
    counting = Counting()
    ids = sampler.draw(3, counting)
    assert counting.taken <= 2 * len(ids) + 100
    assert ids.max() < 10**9


def test_a_rare_poisson_sample_may_be_empty():
    sizes = drawn(Poisson(0.01, 20), 500).sum(axis=1)
    assert (sizes == 0).mean() == pytest.approx(0.99**20, abs=0.1)


def test_a_pass_takes_everybody_once_and_passes_differ():
    sampler = ShuffledPasses(7, 20)
    assert sampler.steps == 3
    batches = [sampler.draw(4, draws(1), step).tolist() for step in range(6)]
    assert [len(batch) for batch in batches] == [7, 7, 6, 7, 7, 6]
    first, second = (list(chain.from_iterable(batches[i : i + 3])) for i in (0, 3))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first == sampler.order(4, draws(1), 0).tolist()


def test_steps_of_a_round_and_rounds_have_addresses_of_their_own(monkeypatch):
    seen: list[Address] = []
    monkeypatch.setattr(Randomness, "address_observer", staticmethod(seen.append))
    for sampler in (Poisson(0.3, 20), Weighted(20, 0.5), FixedSize(3, 20)):
        seen.clear()
        for t in range(3):
            for step in range(4):
                sampler.draw(t, draws(1), step)
        assert len(set(seen)) == len(seen) >= 12


def test_denominators_come_from_declared_numbers_only():
    assert PoissonCohort(0.2, 479).expected_size == pytest.approx(95.8)
    assert FixedCohort(10, 50).expected_size == 10
    assert FullCohort(12).expected_size == 12
    assert ShuffledPasses(7, 20).expected_size == 7
    assert Weighted(4, 0.5).expected_size == 2
    for cohort in (PoissonCohort(0.2), FullCohort()):
        with pytest.raises(FedsimError, match="declared"):
            _ = cohort.expected_size
        with pytest.raises(FedsimError, match="declared"):
            cohort.draw(1, draws(1))


def test_the_event_says_what_the_draw_was():
    event = Event.of(Poisson(0.2, 479), 1.1)
    assert (event.law.name, event.law.rate, event.adjacency) == ("poisson", 0.2, "add-remove")
    assert Event.of(Poisson(0.2, 479, adjacency="zero-out"), 1.1).adjacency == "zero-out"
    event = Event.of(FixedSize(10, 50), 1.1)
    assert (event.law.name, event.law.rate, event.adjacency) == ("fixed", 0.2, "replace-one")
    event = Event.of(Full(50), 1.1)
    assert (event.law.name, event.law.rate, event.adjacency) == ("full", 1.0, "zero-out")
    assert Event.of(Full(adjacency="replace-one"), 1.1).adjacency == "replace-one"
    event = Event.of(ShuffledPasses(7, 20), 1.1, count=4)
    assert (event.law.name, event.adjacency, event.count) == ("shuffle", "zero-out", 2)
    event = Event.of(Weighted(60, 0.5), 1.1)
    assert (event.law.name, event.law.rate, event.adjacency) == ("poisson", 0.5, "add-remove")


@dataclass(frozen=True)
class Allocation:
    """Each client is in ``k`` of ``T`` rounds, drawn by itself."""

    k: int
    T: int
    population: int

    def draw(self, round, draws, step=0):
        asked = (draws if round == 1 else draws.for_replay()).generator
        inside = [
            round - 1 in asked(1, i).permutation(self.T)[: self.k] for i in range(self.population)
        ]
        return np.flatnonzero(inside)


def test_a_sampler_may_look_back_at_earlier_draws(monkeypatch):
    seen: list[Address] = []
    monkeypatch.setattr(Randomness, "address_observer", staticmethod(seen.append))
    rounds = {n: [Allocation(3, 8, n).draw(t, draws(1)) for t in range(1, 9)] for n in (20, 21)}
    assert (np.bincount(np.concatenate(rounds[20])) == 3).all()
    for before, after in zip(rounds[20], rounds[21], strict=True):
        assert after.tolist() in (before.tolist(), [*before, 20])
    assert len(set(seen[:20])) == len(seen[:20]) == 20


@dataclass(frozen=True)
class Mine(Poisson):
    """One of the user's own, which draws everybody and charges for Poisson."""

    def draw(self, round, draws, step=0):
        return np.arange(self.population)


def test_a_users_sampler_is_declared_unless_its_event_follows_from_its_probabilities():
    def declared(sampler: Sampler) -> list[str]:
        plan = ReleasePlan(
            level="client", sampler=sampler, mechanism=Clipping(1.0), noise=Independent(1.0)
        )
        return plan.user_parts

    assert declared(Mine(0.1, 10)) == ["sampler"]
    assert not declared(Weighted(10, 0.5))
    for sampler in (Poisson(0.1, 10), FixedSize(1, 10), Full(10), ShuffledPasses(2, 10)):
        assert not declared(sampler)


def test_an_inclusion_sampler_cannot_say_another_event_or_draw():
    with pytest.raises(FedsimError, match="Liar defines draw, event"):

        class Liar(Weighted):
            def draw(self, round, draws, step=0):
                return np.arange(self.population)

            def event(self, noise_multiplier, **settings):
                return Event.of(Full(10), noise_multiplier)

    class Cheap:
        def law(self):
            return Poisson(1e-6).law()

    with pytest.raises(FedsimError, match="Heir defines law"):

        class Heir(Cheap, Weighted):
            pass


def test_a_probability_above_the_highest_is_refused():
    with pytest.raises(FedsimError, match="probabilities of round 1 must be 10 numbers"):
        Weighted(10, 0.4).draw(1, draws(1))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Poisson(0.0), "cohort.rate is 0.0"),
        (lambda: Poisson(1.5), "cohort.rate is 1.5"),
        (lambda: Poisson(float("nan")), "cohort.rate is nan"),
        (lambda: Poisson(0.5, 0), "cohort.population is 0"),
        (lambda: Poisson(0.5, adjacency="replace-one"), "'add-remove' or 'zero-out'"),
        (lambda: FixedSize(11, 10), r"cohort.size is 11; .*from 1 to 10, the population"),
        (lambda: FixedSize(0, 10), "cohort.size is 0"),
        (lambda: Full(-1), "cohort.population is -1"),
        (lambda: Full(adjacency="add-remove"), "'zero-out' or 'replace-one'"),
        (lambda: ShuffledPasses(0, 10), "batch size is 0"),
        (lambda: Weighted(10, 1.5), "highest probability is 1.5"),
    ],
)
def test_mistakes_get_a_sentence(make, named):
    with pytest.raises(FedsimError, match=named):
        make()


def test_cohorts_and_accounting_load_neither_torch_nor_flower():
    script = (
        "import sys, fedsim.cohorts, fedsim.privacy as p;"
        "p.epsilon(noise_multiplier=1.0, cohort=fedsim.cohorts.PoissonCohort(0.1), rounds=5,"
        " delta=1e-5);"
        "p.Ledger(delta=1e-5).record(p.Entry(event=p.Event.of(fedsim.cohorts.FullCohort(), 1.0)));"
        "bad = {'torch', 'flwr', 'dp_accounting'} & {m.partition('.')[0] for m in sys.modules};"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("spread", [4.0, -1.0])
@pytest.mark.parametrize("seed", [3, None])
def test_samples_of_many_owners_are_those_of_each_alone(monkeypatch, seed, spread):
    # With fewer gaps at a time some samples are not complete at once; the draws stay the same.
    monkeypatch.setattr(poisson, "GAP_DEVIATIONS", spread)
    randomness = Randomness(seed, "ab")
    owners = [Poisson(0.2, 40), Full(7), Poisson(0.9, 30), Poisson(0.01, 2)]
    sources = [Draws(randomness, "example", amplified=True, client=k) for k in range(4)]
    steps = [range(3), range(5), range(2, 4), range(1)]
    ids, drawn = draw_poisson(owners, sources, 6, steps)
    assert ids.shape[:2] == drawn.shape[:2] == (4, 5)
    for k, owner in enumerate(owners):
        assert not drawn[k, len(steps[k]) :].any()
        assert not ids[k][~drawn[k]].any()
        for row, step in enumerate(steps[k]):
            sample = ids[k, row][drawn[k, row]].tolist()
            assert sample == sorted(set(sample))
            assert set(sample) <= set(range(owner.population))
            if seed is not None and owner.rate < 1:
                assert sample == one_gap_after_another(owner, sources[k].generator(6, step))
    assert ids[1, 0][drawn[1, 0]].tolist() == list(range(7))


def one_gap_after_another(sampler, generator):
    sample, last = [], generator.geometric(sampler.rate) - 1
    while last < sampler.population:
        sample.append(last)
        last += generator.geometric(sampler.rate)
    return sample


@pytest.mark.parametrize("sampler", [ShuffledPasses(4, 10), Full(10)])
def test_passes_of_many_owners_are_those_that_each_would_draw(
    sampler: ShuffledPasses | Full,
) -> None:
    owners = [Draws(Randomness(5), "example", False, client) for client in range(3)]
    orders = draw_passes(sampler, owners, 6, 2)
    alone = [[sampler.order(6, owner, number) for number in range(2)] for owner in owners]
    assert orders.tolist() == np.array(alone).tolist()

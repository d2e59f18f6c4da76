from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.cohorts import FixedCohort, FullCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness


def uniforms(seed: int, round: int, population: int) -> np.ndarray:
    return Randomness(seed).generator(Purpose.COHORT, round=round).random(population)


COHORTS = st.sampled_from(
    [
        lambda n: PoissonCohort(0.3, n),
        lambda n: FixedCohort(max(1, n // 3), n),
        lambda n: FullCohort(n),
    ]
)


@given(st.integers(0, 10**6), st.integers(1, 100), st.integers(2, 200), COHORTS)
@settings(max_examples=60)
def test_a_draw_is_a_function_of_its_uniform_numbers(seed, round, population, make):
    first = make(population).draw(uniforms(seed, round, population))
    again = make(population).draw(uniforms(seed, round, population))
    assert first.dtype == np.int64
    assert np.array_equal(first, again)
    assert np.array_equal(first, np.unique(first))


@given(st.integers(0, 10**6), st.integers(1, 100), st.integers(2, 200))
@settings(max_examples=60)
def test_adding_a_client_moves_nobody_else_under_poisson_and_full(seed, round, population):
    numbers = uniforms(seed, round, population + 1)
    assert np.array_equal(numbers[:-1], uniforms(seed, round, population))
    for make in (lambda n: PoissonCohort(0.4, n), FullCohort):
        before = set(make(population).draw(numbers[:-1]).tolist())
        after = set(make(population + 1).draw(numbers).tolist())
        assert after - before <= {population}
        assert before <= after


@given(st.integers(0, 10**6), st.integers(2, 200), st.data())
@settings(max_examples=60)
def test_adding_a_client_swaps_at_most_one_under_a_fixed_size(seed, population, data):
    size = data.draw(st.integers(1, population))
    numbers = uniforms(seed, 3, population + 1)
    before = set(FixedCohort(size, population).draw(numbers[:-1]).tolist())
    after = set(FixedCohort(size, population + 1).draw(numbers).tolist())
    assert len(before) == len(after) == size
    assert (before, len(before - after)) == (before, len(after - before))
    assert after - before <= {population}


def test_ties_are_broken_by_client_id():
    assert FixedCohort(2, 5).draw(np.full(5, 0.5)).tolist() == [0, 1]


def test_poisson_sizes_are_binomial():
    rate, population, rounds = 0.2, 500, 400
    sizes = np.array(
        [
            len(PoissonCohort(rate, population).draw(uniforms(7, t, population)))
            for t in range(rounds)
        ]
    )
    std = np.sqrt(population * rate * (1 - rate))
    assert abs(sizes.mean() - rate * population) < 5 * std / np.sqrt(rounds)
    # Chi-square interval of the variance at about 5 standard deviations.
    assert abs(sizes.var(ddof=1) / std**2 - 1) < 5 * np.sqrt(2 / rounds)


def test_each_client_is_equally_often_in_a_fixed_cohort():
    size, population, rounds = 30, 100, 2000
    seen = np.zeros(population)
    for t in range(rounds):
        seen[FixedCohort(size, population).draw(uniforms(5, t, population))] += 1
    share = size / population
    std = np.sqrt(rounds * share * (1 - share))
    assert np.abs(seen - rounds * share).max() < 5 * std


def test_denominators_come_from_declared_numbers_only():
    assert PoissonCohort(0.2, 479).expected_size == pytest.approx(95.8)
    assert FixedCohort(10, 50).expected_size == 10
    assert FullCohort(12).expected_size == 12
    for cohort in (PoissonCohort(0.2), FullCohort()):
        with pytest.raises(FedsimError, match="declared"):
            _ = cohort.expected_size


def test_the_event_says_what_the_draw_was():
    event = PoissonCohort(0.2, 479).event(1.1)
    assert (event.sampler, event.rate, event.adjacency) == ("poisson", 0.2, "add-remove")
    event = FixedCohort(10, 50).event(1.1)
    assert (event.sampler, event.rate, event.adjacency) == ("fixed", 0.2, "replace-one")
    event = FullCohort(50).event(1.1)
    assert (event.sampler, event.rate, event.adjacency) == ("full", 1.0, "zero-out")
    assert FullCohort(adjacency="replace-one").event(1.1).adjacency == "replace-one"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: PoissonCohort(0.0), "cohort.rate is 0.0"),
        (lambda: PoissonCohort(1.5), "cohort.rate is 1.5"),
        (lambda: PoissonCohort(float("nan")), "cohort.rate is nan"),
        (lambda: PoissonCohort(0.5, 0), "cohort.population is 0"),
        (lambda: FixedCohort(11, 10), r"cohort.size is 11; .*\[1, population = 10\]"),
        (lambda: FixedCohort(0, 10), "cohort.size is 0"),
        (lambda: FullCohort(-1), "cohort.population is -1"),
        (lambda: FullCohort(adjacency="add-remove"), "zero-out or replace-one"),
        (lambda: PoissonCohort(0.5, 10).draw(np.zeros(9)), "declared population of 10"),
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
        "p.Ledger(delta=1e-5).record(event=fedsim.cohorts.FullCohort().event(1.0));"
        "bad = {'torch', 'flwr', 'dp_accounting'} & {m.partition('.')[0] for m in sys.modules};"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

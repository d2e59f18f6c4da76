"""Families of correlated noise: their streams, errors and sensitivities."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsim.errors import FedsimError
from fedsim.privacy.laws import Full, Participation
from fedsim.privacy.laws.cyclic import Cyclic
from fedsim.privacy.laws.poisson import Poisson
from fedsim.privacy.noise import Correlated, NoiseDraws
from fedsim.privacy.noise.banded import Banded
from fedsim.privacy.noise.blt import BLT
from fedsim.privacy.noise.lambda_cgd import LambdaCGD
from fedsim.privacy.noise.tree import Tree
from fedsim.privacy.plan import ReleasePlan

ONCE_100, ONCE_1000 = Participation(100, most=1), Participation(1000, most=1)
TEN_100, TEN_1000 = Participation(100, 10), Participation(1000, 100)
# The first coefficients of (1 - x)^(-1/2): the square root of the matrix of sums, cut off.
ROOT_10 = " ".join(
    str(float(number))
    for number in np.cumprod([1.0, *((2 * j - 1) / (2 * j) for j in range(1, 10))])
)
FAMILIES = [Banded, BLT, LambdaCGD, Tree]


def errors(noise: Correlated) -> tuple[float, float]:
    """Root mean square and largest error of a plan, in units of its noise as one Gaussian."""
    sensitivity = noise.sensitivity(noise.known_participation)
    largest = float(noise.variances(noise.known_participation.rounds).max())
    return noise.error(1.0), sensitivity * math.sqrt(largest)


@pytest.mark.parametrize(
    ("noise", "plan", "mean", "largest"),
    [
        (Banded(1.0, bands=1), ONCE_100, 7.106335, 10),
        (Banded(1.0, bands=2), ONCE_100, 5.181516, 7.215243),
        (Banded(1.0, bands=4), ONCE_100, 3.916143, 5.339856),
        (Banded(1.0, bands=8), ONCE_100, 3.125326, 4.119954),
        (Banded(1.0, bands=16), ONCE_100, 2.662971, 3.356898),
        (Banded(1.0, bands=32), ONCE_100, 2.423163, 2.905914),
        (Banded(1.0, bands=100), ONCE_100, 2.319324, 2.612367),
        (Banded(1.0, bands=1), ONCE_1000, 22.371857, 31.622777),
        (Banded(1.0, bands=2), ONCE_1000, 15.920322, 22.454467),
        (Banded(1.0, bands=4), ONCE_1000, 11.431001, 16.040656),
        (Banded(1.0, bands=8), ONCE_1000, 8.351642, 11.599520),
        (Banded(1.0, bands=16), ONCE_1000, 6.278162, 8.566790),
        (Banded(1.0, bands=32), ONCE_1000, 4.910722, 6.525263),
        (Banded(1.0, bands=100), ONCE_1000, 3.659600, 4.567558),
        (Tree(1.0), ONCE_100, 3.733668, 5.154460),
        (Tree(1.0), ONCE_1000, 5.357328, 7.281738),
        (Banded(1.0, bands=1), TEN_100, 22.472205, 31.622777),
        (Banded(1.0, bands=4), TEN_100, 12.383932, None),
        (Banded(1.0, bands=8), TEN_100, 9.883149, None),
        (Banded(1.0), TEN_100, 9.317657, 12.119374),
        (Banded(1.0, coefficients=ROOT_10), TEN_100, 9.610999, 12.798394),
        (Banded(1.0, bands=1), TEN_1000, 70.746025, 100),
        (Banded(1.0, bands=4), TEN_1000, 36.147999, None),
        (Banded(1.0, bands=8), TEN_1000, 26.410212, None),
        (Banded(1.0, bands=100), TEN_1000, 11.572671, 14.443887),
        (Tree(1.0), TEN_100, 16.275017, 22.836896),
        (Tree(1.0), TEN_1000, 25.261491, 35.541031),
        (LambdaCGD(1.0), TEN_100, 10.014565, 12.962382),
        (LambdaCGD(1.0), TEN_1000, 15.248623, 18.828057),
    ],
)
def test_errors_are_those_of_published_factorisations(noise, plan, mean, largest) -> None:
    found = errors(noise.fit(plan))
    assert found[0] == pytest.approx(mean, rel=1e-5)
    # The optimum of the mean is flat: the largest error is less certain.
    assert largest is None or found[1] == pytest.approx(largest, rel=3e-4)


@pytest.mark.parametrize(
    ("buffers", "plan", "mean"),
    [(1, TEN_100, 9.893517), (1, TEN_1000, 12.449439), (2, TEN_1000, 12.193852)],
)
def test_buffers_are_as_good_as_published_ones(buffers, plan, mean) -> None:
    assert BLT(1.0, buffers=buffers).fit(plan).error(1.0) <= 1.002 * mean


def test_no_more_buffers_are_kept_than_help() -> None:
    assert len(BLT(1.0, buffers=2).fit(TEN_100).coefficients.split()) == 2
    assert len(BLT(1.0, buffers=2).fit(TEN_1000).coefficients.split()) == 4


def test_coefficients_are_those_of_published_bands() -> None:
    for bands, first in ((2, 0.761475), (4, 0.706903), (16, 0.550913)):
        noise = Banded(1.0, bands=bands).fit(ONCE_100)
        assert noise.series(2)[1] == pytest.approx(first, abs=1e-4)


@pytest.mark.parametrize(
    ("series", "plan", "exact"),
    [("1 .6 .3", Participation(12, 3), 2.408319), ("1 .7 .5 .2", Participation(12, 3), 2.877499)],
)
def test_sensitivities_are_those_of_the_worst_pattern(series, plan, exact) -> None:
    noise = Banded(1.0, coefficients=series).fit(plan)
    assert noise.sensitivity(plan) == pytest.approx(exact, abs=1e-6)
    assert worst(matrix_of(noise), plan) == pytest.approx(exact, abs=1e-6)


def test_a_series_that_increases_has_an_upper_bound() -> None:
    plan = Participation(12, 2)
    noise = Banded(1.0, coefficients="1 .2 .9").fit(plan)
    assert worst(matrix_of(noise), plan) == pytest.approx(4.392038, abs=1e-6)
    assert noise.sensitivity(plan) == pytest.approx(4.889785, abs=1e-6)


@pytest.mark.parametrize(
    ("noise", "plan", "base", "more"),
    [
        (Banded(1.0, bands=3), Participation(8, 3), 1.707572, 1.909358),
        (LambdaCGD(1.0, coefficients="0.8"), Participation(8, 3), 3.449250, 3.878777),
    ],
)
def test_a_round_made_once_more_is_a_row_of_the_matrix_more(noise, plan, base, more) -> None:
    noise = noise.fit(plan)
    scale = noise.column_norm if isinstance(noise, Banded) else 1.0
    sensitivity = noise.sensitivity(plan) / scale
    assert sensitivity == pytest.approx(base, abs=1e-4)
    assert math.hypot(sensitivity, noise.repeat_sensitivity(plan) / scale) == pytest.approx(
        more, abs=1e-4
    )


def matrix_of(noise: Correlated) -> np.ndarray:
    """C of a family whose C is square, ``[T, T]``."""
    rounds = noise.known_participation.rounds
    series = noise.series(rounds)  # type: ignore[attr-defined]
    return np.array(
        [[series[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)]
    )


def worst(matrix: np.ndarray, plan: Participation) -> float:
    """By all patterns, of equal rows: no entry of the matrix is negative."""
    return max(
        np.linalg.norm(matrix[:, list(chosen)].sum(axis=1))
        for size in range(1, plan.participations + 1)
        for chosen in combinations(range(plan.rounds), size)
        if all(b - a >= plan.separation for a, b in pairwise(chosen))
    )


def streamed(noise: Correlated, rounds: int, draws: dict[tuple[int, int], torch.Tensor]) -> list:
    """The noise of each round, of these draws by round and number."""
    state, found = noise.start(), []
    for number in range(1, rounds + 1):
        of_round = NoiseDraws(number, lambda age, n, t=number: draws[t - age, n].clone())
        made, state = noise.combine(of_round, state)
        found.append(made.clone())
    return found


@pytest.mark.parametrize(
    "noise",
    [
        Banded(1.0),
        Banded(1.0, bands=7),
        Banded(1.0, bands=1),
        BLT(1.0),
        LambdaCGD(1.0),
    ],
    ids=lambda noise: str(noise)[:30],
)
@pytest.mark.parametrize("plan", [Participation(14, 4), Participation(13), Participation(9, 9)])
def test_streams_are_what_the_dense_matrix_makes(noise, plan) -> None:
    noise, generator = noise.fit(plan), torch.Generator().manual_seed(3)
    draws = {
        (t, 0): torch.randn(5, generator=generator, dtype=torch.float64)
        for t in range(1, plan.rounds + 1)
    }
    expected = np.linalg.solve(matrix_of(noise), torch.stack([*draws.values()]).numpy())
    found = torch.stack(streamed(noise, plan.rounds, draws)).numpy()
    assert np.abs(found - expected).max() <= 1e-12
    summed = np.tril(np.ones((plan.rounds, plan.rounds))) @ np.linalg.inv(matrix_of(noise))
    assert noise.variances(plan.rounds) == pytest.approx(np.square(summed).sum(axis=1))


@pytest.mark.parametrize(("rounds", "separation"), [(16, 16), (13, 13), (22, 6), (9, 1)])
def test_a_tree_releases_its_nodes_and_nothing_else(rounds, separation) -> None:
    noise = Tree(1.0).fit(Participation(rounds, separation))
    nodes = [
        (t, height)
        for t in range(1, rounds + 1)
        for height in range(5)
        if ((t - 1) % separation + 1) % (1 << height) == 0
    ]
    # What each node's draw adds to each round, and which rounds it is the sum of.
    units = {node: torch.eye(len(nodes), dtype=torch.float64)[i] for i, node in enumerate(nodes)}
    zeros = torch.zeros(len(nodes), dtype=torch.float64)
    draws = {(t, h): units.get((t, h), zeros) for t in range(1, rounds + 1) for h in range(5)}
    made = torch.stack(streamed(noise, rounds, draws)).numpy().cumsum(axis=0)
    incidence = np.array(
        [[t - (1 << height) < r <= t for r in range(1, rounds + 1)] for t, height in nodes], float
    )
    # Sums over rounds are functions of the noisy nodes alone ...
    assert made @ incidence == pytest.approx(np.tril(np.ones((rounds, rounds))))
    assert noise.variances(rounds) == pytest.approx(np.square(made).sum(axis=1))
    # ... of which a row is in no more than is charged.
    plan = noise.known_participation
    assert worst(incidence, plan) <= noise.sensitivity(plan) * (1 + 1e-12)
    assert np.linalg.norm(incidence, axis=0).max() <= noise.column_norm


@given(st.sampled_from(FAMILIES), st.integers(1, 30), st.integers(1, 8))
def test_invariants_of_families(family, rounds, separation) -> None:
    plan = Participation(rounds, separation)
    noise = family(2.0).fit(plan)
    # What config.toml says gives the same noise.
    assert family(2.0, coefficients=noise.coefficients).fit(plan) == noise
    prefixes = [noise.sensitivity(plan.first(t)) for t in range(1, rounds + 1)]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(prefixes))
    assert noise.sensitivity(plan) >= math.sqrt(plan.participations) * (1 - 1e-12)
    assert noise.repeat_sensitivity(plan) >= 1
    independent = Banded(2.0, bands=1).fit(plan)
    if family in (Banded, LambdaCGD):
        assert noise.error(1.0) <= independent.error(1.0) * (1 + 1e-9)
    assert noise.error(1.0) * 2.0 / noise.sensitivity(plan) == pytest.approx(noise.error())


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        (Banded(1.0, bands=1), [1.1994, 1.1994, 1.7601, 1.7601, 2.9432, 4.3772, 4.3772]),
        (Banded(1.0), [0.7370, 1.1994, 1.4508, 1.7601, 2.9432, 4.2263, 4.3772]),
        (BLT(1.0, buffers=1), [0.6734, 1.0293, 1.3221, 1.6307, 2.8874, 4.2287, 4.3772]),
        (LambdaCGD(1.0), [0.6280, 1.0797, 1.3252, 1.6739, 2.9066, 4.2124, 4.3772]),
    ],
)
def test_fewer_rounds_that_were_planned_cost_what_their_rows_do(noise, expected) -> None:
    def plan(multiplier: float) -> ReleasePlan:
        return ReleasePlan(
            level="client",
            sampler=Cyclic(10, population=100),
            mechanism=Gaussian(),
            noise=noise.with_multiplier(multiplier),
            rounds=100,
        )

    fitted = plan(1.0).noise
    assert isinstance(fitted, Correlated)
    one = plan(fitted.sensitivity(TEN_100))
    found = [one.epsilon(1e-5, after_round=t) for t in (1, 10, 11, 20, 50, 91, 100)]
    assert found == pytest.approx(expected, abs=2e-3)
    assert one.epsilon(1e-5) == found[-1]


def test_more_bands_are_never_worse() -> None:
    found = [Banded(1.0, bands=n).fit(Participation(60, 12)).error(1.0) for n in range(1, 13)]
    assert all(b <= a * (1 + 1e-6) for a, b in pairwise(found))


@pytest.mark.parametrize(
    ("groups", "rate", "expected"),
    [
        (1, 0.01, 1.8283),
        (2, 0.02, 2.7735),
        (4, 0.04, 4.1852),
        (10, 0.1, 7.0466),
        (20, 0.2, 10.1280),
        (100, 1.0, 17.8566),
    ],
)
def test_bands_within_groups_are_amplified(groups, rate, expected) -> None:
    sampler = Cyclic(groups, rate, population=1000)
    noise = Banded(1.0, bands=min(groups, 20))
    plan = ReleasePlan(
        level="client", sampler=sampler, mechanism=Gaussian(), noise=noise, rounds=1000
    )
    # The multiplier is that of the fresh draws: in units of C's columns it is to be 1.
    fitted = plan.noise
    assert isinstance(fitted, Banded)
    plan = replace(plan, noise=fitted.with_multiplier(fitted.column_norm))
    assert plan.epsilon(1e-5) == pytest.approx(expected, abs=2e-3)
    assert plan.event().law.rounds == groups if rate < 1 else 1000


class Gaussian:
    guarantee = "gaussian"


def test_what_couples_more_rounds_than_a_group_is_not_amplified() -> None:
    def rate(sampler, noise) -> float:
        plan = ReleasePlan(
            level="client", sampler=sampler, mechanism=Gaussian(), noise=noise, rounds=40
        )
        return plan.event().law.rate

    groups = Cyclic(5, 0.3, population=1000)
    assert rate(groups, Banded(1.0, bands=5)) == rate(groups, Tree(1.0)) == 0.3
    for noise in (Banded(1.0, bands=6), BLT(1.0), LambdaCGD(1.0)):
        assert rate(groups, noise) == 1
    assert rate(Poisson(0.3, 1000), Banded(1.0, bands=3)) == 1
    assert rate(Full(1000), Banded(1.0, bands=3)) == 1


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (Banded(1.0, coefficients="1 2"), "the first column of C"),
        (Banded(1.0, coefficients=".9 .2"), "the first column of C: 1, and then"),
        (Banded(1.0, bands=3, coefficients="1 .5"), "has 2 numbers"),
        (BLT(1.0, coefficients=".9 .3 .2"), "pairs of a buffer's decay and weight"),
        (BLT(1.0, coefficients=".9 .7 .5 .7"), "weights together at most 1"),
        (Tree(1.0, coefficients="6"), "it must be at most 5"),
        (Tree(1.0, coefficients="many"), "the number of rounds of a tree"),
        (LambdaCGD(1.0, coefficients="x"), "lambda, a number from 0 to 1"),
        (LambdaCGD(1.0, coefficients=".5 .6"), "lambda, a number from 0 to 1"),
    ],
)
def test_coefficients_that_are_none_are_refused(noise, said) -> None:
    with pytest.raises(FedsimError, match=said):
        ReleasePlan(
            level="client",
            sampler=Cyclic(5, population=9),
            mechanism=Gaussian(),
            noise=noise,
            rounds=20,
        ).event()

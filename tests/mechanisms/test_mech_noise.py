from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping, Mechanism, NoiseSource, Normalization
from fedsim.mechanisms.exact import MAX_ROWS, FreeSum, GridSum
from fedsim.mechanisms.noise import share_multiplier, top_up_multiplier
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import DenseRows, Layout


@pytest.mark.parametrize("hardened", [False, True])
def test_draws_are_standard_normal(hardened: bool) -> None:
    draws = NoiseSource(np.random.default_rng(0), hardened).normal(50_000)
    assert stats.kstest(draws, "norm").pvalue > 1e-3
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], len(draws))
    assert low < np.sum(draws**2) < high


def test_keyed_noise_repeats_and_differs_by_round_while_system_noise_never_repeats() -> None:
    def draw(randomness: Randomness, t: int) -> np.ndarray:
        return NoiseSource(randomness.generator(Purpose.NOISE, level="client", round=t)).normal(8)

    keyed = Randomness(5)
    assert np.array_equal(draw(keyed, 1), draw(keyed, 1))
    assert not np.array_equal(draw(keyed, 1), draw(keyed, 2))
    system = Randomness(None)
    assert not np.array_equal(draw(system, 1), draw(system, 1))


def test_the_global_generators_are_neither_read_nor_moved() -> None:
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    before = (np.random.get_state()[1].copy(), torch.get_rng_state())  # noqa: NPY002
    total = Clipping(1.0).accumulate({}, Layout.of({"w": torch.ones(5)}))
    Clipping(1.0).release(
        {},
        total,
        noise_multiplier=1.0,
        denominator=1.0,
        noise=NoiseSource(np.random.default_rng(1)),
    )
    assert np.array_equal(before[0], np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(before[1], torch.get_rng_state())


@pytest.mark.parametrize("asked", [1, 3, 1000])
def test_shares_and_top_up_add_up_whoever_drops_out(asked: int) -> None:
    for usable in {0, 1, asked // 2, asked}:
        shares = usable * share_multiplier(1.7, asked) ** 2
        assert shares + top_up_multiplier(1.7, asked, usable) ** 2 == pytest.approx(1.7**2)
    assert top_up_multiplier(1.7, 0, 0) == 1.7


@pytest.mark.parametrize(("asked", "usable"), [(3, 4), (0, 1), (3, -1)])
def test_more_shares_than_were_asked_for_are_refused(asked: int, usable: int) -> None:
    with pytest.raises(FedsimError, match="usable"):
        top_up_multiplier(1.0, asked, usable)


def test_the_means_noise_is_alike_on_both_placements() -> None:
    n, d, z = 8, 20_000, 1.4
    mechanism, layout = Normalization(2.0), Layout.of({"w": torch.empty(d)})
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    clean = mechanism.bound(rows).double().sum(0)
    server, client = (mechanism.accumulate({}, layout) for _ in range(2))
    server.add(DenseRows(rows))
    client.add_shares(
        mechanism.share(
            rows,
            {},
            noise_multiplier=z,
            denominator=8.0,
            asked=n,
            noise=[NoiseSource(np.random.default_rng([1, k])) for k in range(n)],
        )
    )
    residuals = [
        mechanism.release(
            {},
            total,
            noise_multiplier=z,
            denominator=1.0,
            noise=NoiseSource(np.random.default_rng(2)),
            asked=asked,
        ).mean
        - clean
        for total, asked in ((server, None), (client, n))
    ]
    assert stats.ks_2samp(*(r.numpy() for r in residuals)).pvalue > 1e-4
    assert residuals[0].std().item() == pytest.approx(2 * z, rel=0.03)


def test_the_signal_to_noise_ratio_of_normalisation_is_das_constant() -> None:
    # Quadratic problem: d = 200 parameters, all of n = r = 100 clients, z = 21.91456.
    d, n, z = 200, 100, 21.91456
    expected_length = math.sqrt(2) * math.exp(special.gammaln((d + 1) / 2) - special.gammaln(d / 2))
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows *= torch.logspace(-6, 3, n, dtype=torch.float64)[:, None]

    def ratio(mechanism: Mechanism, c: float) -> float:
        bounded = mechanism.bound(rows).norm(dim=1).mean().item()
        return bounded / (share_multiplier(z, n) * c * expected_length)

    for c in (0.1, 1.0, 50.0):
        assert ratio(Normalization(c), c) == pytest.approx(0.032307, abs=5e-7)
        assert ratio(Clipping(c), c) <= ratio(Normalization(c), c)
    noise = [NoiseSource(np.random.default_rng(k)) for k in range(n)]
    shares = Normalization(1.0).share(
        torch.zeros(n, d), {}, noise_multiplier=z, denominator=100.0, asked=n, noise=noise
    )
    measured = shares.rows.norm(dim=1).mean().item()
    assert 1 / measured == pytest.approx(0.032307, rel=0.02)


@pytest.mark.parametrize("radius", [1e-30, 0.3, 1.0, 7.0, 1e30])
def test_the_grid_is_a_power_of_two_no_coarser_than_c_over_2_to_the_30(radius: float) -> None:
    unit = GridSum(radius, 1).unit
    assert math.frexp(unit)[0] == 0.5
    assert radius * 2.0**-31 < unit <= radius * 2.0**-30


def test_sums_are_exact_up_to_the_last_row_allowed_and_refused_beyond() -> None:
    grid = GridSum(1.9999999, 1)
    largest = math.floor(grid.radius / grid.unit)
    grid.add_(torch.full((2**20, 1), float(largest), dtype=torch.float64))
    for _ in range(3):
        grid.add_(torch.full((2**20, 1), float(largest), dtype=torch.float64))
    assert grid.rows == MAX_ROWS
    exact = largest * MAX_ROWS
    assert exact < 2**53
    assert int(grid.value().item() / grid.unit) == exact
    with pytest.raises(FedsimError, match="rows"):
        grid.add_(torch.zeros(1, 1, dtype=torch.float64))


def test_rows_are_rounded_towards_zero() -> None:
    grid = GridSum(1.0, 4)
    grid.add_(torch.tensor([[1.7, -1.7, 0.99, -0.99]], dtype=torch.float64))
    assert (grid.value() / grid.unit).tolist() == [1.0, -1.0, 0.0, 0.0]


def test_what_a_float64_row_loses_to_the_coarse_grid_is_kept_where_no_noise_is_added() -> None:
    value = torch.tensor([[0.1234567890123456]], dtype=torch.float64)
    grid = GridSum(1.0, 1, fine=True)
    grid.add_(value / grid.unit)
    assert grid.value().item() == pytest.approx(value.item(), abs=2e-17)
    noisy = grid.noisy(1e-300, NoiseSource(np.random.default_rng(0)))
    assert noisy.item() / grid.unit == math.floor(value.item() / grid.unit)


def test_a_free_sum_keeps_small_and_large_rows_apart() -> None:
    free = FreeSum(2)
    rows = torch.tensor([[1e6, 2.0**-40], [-1e6, 2.0**-41]], dtype=torch.float64)
    free.add_(rows * FreeSum.SCALE)
    assert free.value().tolist() == [0.0, 1.5 * 2.0**-40]

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from release_helpers import layout_of_rows, one_round, releaser, source
from scipy import stats
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.federation.aggregation.shares import ShareRequest
from fedsim.mechanisms import Clipping, Mechanism, NoPrivacy, Normalization, PartialSum, Releaser
from fedsim.privacy import Independent
from fedsim.rows import DenseRows, Layout

NAN = float("nan")


def summed(mechanism: Mechanism, *blocks: Tensor, weights: Tensor | None = None) -> PartialSum:
    layout = layout_of_rows(blocks[0])
    total = releaser(mechanism, layout).start(mechanism.init(layout))
    start = 0
    for block in blocks:
        part = None if weights is None else weights[start : start + len(block)]
        total.add(DenseRows(block), weights=part)
        start += len(block)
    return total


def mean(mechanism: Mechanism, total: PartialSum, denominator: float = 1.0) -> Tensor:
    layout = total.definition.segments[0].layout
    return releaser(mechanism, layout, 0.0, denominator).release(total, source()).mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_round_of_dp_fedavg_in_closed_form(dtype: torch.dtype) -> None:
    # w = (1, 1), eta = 0.1; u = (3, 4), (-.3, -.4) and C = 1 are Delta = -0.1 u and C = 0.1.
    w = torch.ones(2, dtype=torch.float64)
    block = torch.tensor([[0.7, 0.6], [1.03, 1.04]], dtype=dtype) - 1
    for mechanism, expected in (
        (Clipping(0.1), [0.985, 0.98]),
        (Normalization(0.1), [1.0, 1.0]),
        (NoPrivacy("uniform"), [0.865, 0.82]),
    ):
        after = w + mean(mechanism, summed(mechanism, block), denominator=2.0)
        torch.testing.assert_close(
            after, torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "mechanism",
    [Clipping(0.7), Normalization(3.3), NoPrivacy("uniform"), NoPrivacy("num-examples")],
)
@given(seed=st.integers(0, 2**31))
def test_sums_have_the_same_bytes_for_any_order_and_blocking(
    mechanism: Mechanism, dtype: torch.dtype, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(rng.normal(size=(23, 17)) * 10.0 ** rng.integers(-9, 4, (23, 1)))
    rows, weights = rows.to(dtype), torch.from_numpy(rng.integers(0, 2, 23).astype(float))
    if mechanism == NoPrivacy("num-examples"):
        weights = weights * torch.from_numpy(rng.integers(1, 5000, 23))
    once = mean(mechanism, summed(mechanism, rows, weights=weights))
    order = torch.from_numpy(rng.permutation(23))
    blocks = torch.split(rows[order], int(rng.integers(1, 24)))
    again = mean(mechanism, summed(mechanism, *blocks, weights=weights[order]))
    assert once.numpy().tobytes() == again.numpy().tobytes()


@pytest.mark.parametrize("mechanism", [Clipping(0.7), Normalization(0.7), NoPrivacy("uniform")])
@pytest.mark.parametrize("d", [7850, 100_003])
def test_long_rows_have_the_same_bytes_for_any_blocking(mechanism: Mechanism, d: int) -> None:
    rows = torch.randn(70, d, generator=torch.Generator().manual_seed(d))
    once = mean(mechanism, summed(mechanism, rows))
    for size in (1, 3, 69):
        again = mean(mechanism, summed(mechanism, *torch.split(rows.flip(0), size)))
        assert once.numpy().tobytes() == again.numpy().tobytes()


@given(st.integers(0, 2**31), st.floats(1e-3, 10))
def test_dropping_a_row_moves_the_noise_free_sum_by_at_most_c(seed: int, c: float) -> None:
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(8, 5)))
    for mechanism in (Clipping(c), Normalization(c)):
        moved = mean(mechanism, summed(mechanism, rows)) - mean(
            mechanism, summed(mechanism, rows[1:])
        )
        assert torch.linalg.vector_norm(moved).item() <= c * (1 + 1e-12)


def test_non_finite_rows_contribute_nothing_and_are_counted() -> None:
    rows = torch.tensor([[1.0, 0.0], [NAN, 1.0], [math.inf, 0.0], [0.0, 0.5]])
    for mechanism in (Clipping(1.0), Normalization(1.0), NoPrivacy("uniform")):
        total = summed(mechanism, rows)
        assert (total.count, total.rejected) == (2, 2)
        without = summed(mechanism, rows[[0, 3]])
        assert torch.equal(mean(mechanism, total), mean(mechanism, without))


def test_weights_act_after_bounding_and_zero_removes_a_row() -> None:
    rows = torch.tensor([[30.0, 40.0], [3.0, 4.0], [1.0, 0.0]])
    total = summed(Clipping(1.0), rows, weights=torch.tensor([0.5, 1.0, 0.0]))
    torch.testing.assert_close(
        mean(Clipping(1.0), total), torch.tensor([0.9, 1.2], dtype=torch.float64), atol=4e-9, rtol=0
    )
    assert total.count == 2


@pytest.mark.parametrize("weight", [-0.1, 1.01, 991.0, NAN])
def test_weights_that_exceed_the_sensitivity_are_refused(weight: float) -> None:
    with pytest.raises(FedsimError, match="weights"):
        summed(Clipping(1.0), torch.ones(1, 2), weights=torch.tensor([weight]))


def test_without_privacy_the_mean_is_weighted_by_examples_or_uniform() -> None:
    rows, weights = torch.tensor([[1.0], [4.0]]), torch.tensor([1.0, 3.0])
    by_examples = NoPrivacy("num-examples")
    assert mean(by_examples, summed(by_examples, rows, weights=weights)).item() == 3.25
    alike = NoPrivacy("uniform")
    assert mean(alike, summed(alike, rows, weights=weights)).item() == 2.5
    with pytest.raises(FedsimError, match="num-examples"):
        summed(by_examples, rows)


def test_without_privacy_noise_is_refused_and_diverged_rows_are_counted() -> None:
    total = summed(NoPrivacy("uniform"), torch.tensor([[1.0], [2.0**21]]))
    assert (total.count, total.rejected) == (1, 1)
    with pytest.raises(FedsimError, match="noise protects only what"):
        releaser(NoPrivacy("uniform"), layout_of_rows(torch.ones(1, 1)), 1.0)
    assert NoPrivacy("uniform").guarantee == "none"
    assert Clipping(1.0).guarantee == "gaussian"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bound_that_never_binds_without_noise_is_the_uniform_mean(dtype: torch.dtype) -> None:
    rows = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).to(dtype) * 1e-2
    expected = mean(NoPrivacy("uniform"), summed(NoPrivacy("uniform"), rows))
    for c in (1.0, 63.0, 1e4, 1e9):
        found = mean(Clipping(c), summed(Clipping(c), rows), denominator=9.0)
        tolerance = 1e-9 if dtype == torch.float64 or c > 64 else c * 2.0**-30
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def test_the_mean_of_no_rows_without_privacy_is_zero() -> None:
    total = releaser(NoPrivacy("uniform"), Layout.of({"w": torch.ones(3)})).start({})
    assert torch.equal(mean(NoPrivacy("uniform"), total), torch.zeros(3, dtype=torch.float64))


def test_an_empty_cohort_releases_pure_noise() -> None:
    layout = Layout.of({"w": torch.ones(20_000)})
    releasing = releaser(Clipping(2.0), layout, 1.5, 10.0)
    release = releasing.release(releasing.start({}), source(3))
    assert release.mean.std().item() == pytest.approx(0.3, rel=0.03)


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("mechanism", [Clipping(0.37), Normalization(5.0)])
def test_noise_on_the_sum_has_standard_deviation_z_c(mechanism: Clipping, hardened: bool) -> None:
    d, z = 40_000, 1.3
    rows = torch.randn(5, d, generator=torch.Generator().manual_seed(0))
    noisy = one_round(mechanism, {}, rows, z, 4.0, source(5, hardened=hardened)).mean
    residual = (
        (noisy - mean(mechanism, summed(mechanism, rows), 4.0)).numpy()
        * 4
        / (z * mechanism.clip_norm)
    )
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], d)
    assert low < float(np.sum(residual**2)) < high
    assert stats.kstest(residual, "norm").pvalue > 1e-4


def test_released_sums_lie_on_the_grid() -> None:
    noisy = one_round(Clipping(0.3), {}, torch.randn(3, 50), 0.7, 1.0).mean
    units = noisy / 2.0**-32
    assert torch.equal(units, units.round())


def test_noise_is_fresh_in_every_release() -> None:
    rows = torch.zeros(1, 20_000)
    noise = source(7)
    a, b = (one_round(Clipping(1.0), {}, rows, 1.0, 1.0, noise).mean for _ in range(2))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.04


@pytest.mark.parametrize("denominator", [0.0, -1.0, NAN])
def test_a_denominator_that_is_not_positive_is_refused(denominator: float) -> None:
    with pytest.raises(FedsimError, match="denominator"):
        Releaser(
            ShareRequest(Clipping(1.0), Independent(1.0), denominator, share_count=1),
            layout_of_rows(torch.ones(1, 2)),
        )


def test_mechanisms_are_values() -> None:
    assert Clipping(1.0) == Clipping(1.0) != Clipping(2.0)
    assert repr(Normalization(1.0)) == "Normalization(clip_norm=1.0, smoothing=0.0)"
    assert len({Clipping(1.0), Clipping(1.0), NoPrivacy("uniform")}) == 2


@pytest.mark.parametrize("weight", [1.0001, -0.1, NAN, math.inf])
def test_a_weight_that_would_exceed_the_sensitivity_is_refused(weight: float) -> None:
    weights = torch.tensor([0.5, weight], dtype=torch.float64)
    with pytest.raises(FedsimError, match=r"weights of rows must lie in \[0, 1\]"):
        summed(Clipping(1.0), torch.ones(2, 3), weights=weights)

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from release_helpers import layout_of_rows, releaser
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms import AdaClip, Clipping, Normalization, NormBound
from fedsim.mechanisms.base import BoundedRows, State
from fedsim.mechanisms.scaling import ScalingMechanism
from fedsim.rows import DenseRows, Layout, LinearPart, OuterRows

NAN, INF = float("nan"), float("inf")
FLOATS32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
FLOATS64 = st.floats(allow_nan=True, allow_infinity=True)
EXTREMES = [0.0, 1e-45, 1e-38, 1e-30, 1.0, 1e30, 3e38, -3e38, NAN, INF]
MECHANISMS = [Clipping(1.5), NormBound(0.3), Normalization(1.5), Normalization(2.0, smoothing=0.01)]


def norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows.double(), dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_forms_of_clipping_and_normalisation(dtype: torch.dtype) -> None:
    block = torch.tensor([[3, 4], [0.3, 0.4], [0, 0], [NAN, 1], [INF, 0]], dtype=dtype)
    clipped = [[0.6, 0.8], [0.3, 0.4], [0, 0], [0, 0], [0, 0]]
    normalised = [[0.6, 0.8], [0.6, 0.8], [0, 0], [0, 0], [0, 0]]
    smooth = [[3 / 5.5, 4 / 5.5], [0.3, 0.4], [0, 0], [0, 0], [0, 0]]
    for mechanism, expected in (
        (Clipping(1.0), clipped),
        (Normalization(1.0), normalised),
        (Normalization(1.0, smoothing=0.5), smooth),
    ):
        bounded = mechanism.bound(block)
        assert bounded.dtype == dtype
        torch.testing.assert_close(
            bounded, torch.tensor(expected, dtype=dtype), atol=2e-9, rtol=1e-7
        )


@given(st.lists(st.lists(FLOATS32, min_size=3, max_size=3), min_size=1, max_size=5))
def test_no_float32_row_leaves_the_ball(rows: list[list[float]]) -> None:
    block = torch.tensor(rows, dtype=torch.float32)
    for mechanism in MECHANISMS:
        bounded = norms(mechanism.bound(block))
        assert bool((bounded <= mechanism.clip_norm * (1 + 1e-7)).all())


@given(
    st.lists(st.lists(FLOATS64, min_size=3, max_size=3), min_size=1, max_size=5),
    st.sampled_from([1e-30, 1e-3, 1.0, 7.0, 1e9]),
)
def test_no_float64_row_leaves_the_ball_at_any_c(rows: list[list[float]], c: float) -> None:
    block = torch.tensor(rows, dtype=torch.float64)
    for mechanism in (Clipping(c), Normalization(c), Normalization(c, smoothing=1e-3)):
        bounded = norms(mechanism.bound(block) / c)
        assert bool((bounded <= 1.0).all())


@pytest.mark.parametrize("pair", list(itertools.product(EXTREMES, EXTREMES)))
def test_extreme_rows_are_normalised_to_c_and_non_finite_ones_to_zero(
    pair: tuple[float, float],
) -> None:
    block = torch.tensor([pair], dtype=torch.float32)
    got = norms(Normalization(2.0).bound(block)).item()
    finite, zero = bool(torch.isfinite(block).all()), bool((block == 0).all())
    assert got == pytest.approx(2.0 if finite and not zero else 0.0, abs=1e-6)


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-200, 1e200, 1.7e308])
def test_float64_rows_whose_squares_leave_the_range_are_normalised(size: float) -> None:
    block = torch.full((1, 7), size, dtype=torch.float64)
    expected = torch.full((1, 7), 1 / 7**0.5, dtype=torch.float64)
    torch.testing.assert_close(Normalization(1.0).bound(block), expected, rtol=1e-9, atol=2e-9)
    finite = DenseRows(block).norms()
    assert bool(torch.isfinite(finite).all()) == (size < 1e308)


@given(st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_homogeneity(c: float, seed: int) -> None:
    block = torch.from_numpy(np.random.default_rng(seed).normal(size=(4, 6)))
    same = Normalization(1.0).bound(c * block)
    torch.testing.assert_close(same, Normalization(1.0).bound(block), atol=4e-9, rtol=0)
    scaled = Clipping(c).bound(c * block)
    torch.testing.assert_close(scaled, c * Clipping(1.0).bound(block), atol=4e-9 * c, rtol=0)


def test_normalisation_equals_clipping_to_the_byte_where_every_row_is_longer_than_c() -> None:
    block = torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    c = 0.999 * float(norms(block).min())
    assert torch.equal(Normalization(c).bound(block), Clipping(c).bound(block))


def test_rows_within_c_pass_clipping_unchanged() -> None:
    block = torch.randn(9, 5, generator=torch.Generator().manual_seed(2))
    assert torch.equal(Clipping(1000.0).bound(block), block)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_scales_of_norms_of_any_shape_give_the_bounded_rows(mechanism: ScalingMechanism) -> None:
    block = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    norms = torch.linalg.vector_norm(block, dim=2)
    factors = mechanism.scales(
        norms, mechanism.round_state(mechanism.init(layout_of_rows(block))), 1.0
    )
    assert factors.shape == (6, 4)
    by_scale = (block * factors[..., None]).reshape(24, 5)
    torch.testing.assert_close(by_scale, mechanism.bound(block.reshape(24, 5)), atol=4e-9, rtol=0)


def test_a_known_norm_bound_is_enforced_and_violations_are_counted() -> None:
    mechanism = NormBound(5.0)
    block = torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 1.0]])
    total = releaser(mechanism, layout_of_rows(block)).start({})
    total.add(DenseRows(block))
    assert (total.count, total.clipped) == (3, 1)
    torch.testing.assert_close(
        mechanism.bound(block), torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 1.0]])
    )


def test_zero_dimensional_parameters_are_part_of_the_norm() -> None:
    layout = Layout.of({"w": torch.tensor([3.0]), "b": torch.tensor(4.0)})
    row = layout.flatten({"w": torch.tensor([3.0]), "b": torch.tensor(4.0)})
    torch.testing.assert_close(Clipping(1.0).bound(row[None]), torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF, 2e9, 1e31])
def test_impossible_bounds_are_refused(value: float) -> None:
    with pytest.raises(FedsimError, match="clip-norm"):
        Clipping(value)
    with pytest.raises(FedsimError, match="clip-norm"):
        Normalization(value)
    if not 0 <= value <= 1e30:
        with pytest.raises(FedsimError, match="smoothing"):
            Normalization(1.0, smoothing=value)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_scale_of_a_non_finite_row_is_nan_and_of_a_zero_row_finite(
    mechanism: ScalingMechanism,
) -> None:
    scales = mechanism.scales(torch.tensor([NAN, 0.0]), {}, 1.0)
    assert scales.isnan().tolist() == [True, False]


class Halved(Clipping):
    """Does more to a row than clipping, in its own way."""

    def bound_(self, y: Tensor, round_state: State) -> BoundedRows:
        shaped = super().bound_(y, round_state)
        return shaped._replace(factor=shaped.factor / 2)


class Half:
    def bound_(self, y: Tensor, round_state: State) -> BoundedRows:
        shaped = super().bound_(y, round_state)
        return shaped._replace(factor=shaped.factor / 2)


class Inherited(Half, Clipping):
    """The same, from a class that is no bound."""


def test_a_subclass_that_shapes_rows_in_its_own_way_is_summed_in_that_way() -> None:
    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    for mechanism in (Halved(1.0), Inherited(1.0)):
        summing = releaser(mechanism, layout_of_rows(rows), 0.0, 6.0)
        total = summing.start({})
        total.add(DenseRows(rows))
        mean = summing.release(total).mean
        assert torch.allclose(mean, Clipping(1.0).bound(rows).double().mean(0) / 2, atol=1e-8)
        assert torch.allclose(mean, mechanism.bound(rows).double().mean(0), atol=1e-8)


@pytest.mark.parametrize(
    "mechanism",
    [Clipping(1.0), Normalization(0.5), AdaClip(), AdaClip(center=False), NormBound(2.0)],
    ids=str,
)
@pytest.mark.parametrize("lengths", [[1e-2, 0.1, 0.2, 3.0], [1e-250, 0.0, 1e150, 1e250]])
def test_a_sum_of_rows_of_any_length_is_that_of_the_bounded_rows(
    mechanism: ScalingMechanism, lengths: list[float]
) -> None:
    n, d = len(lengths), 50
    layout = Layout.of({"w": torch.zeros(d, dtype=torch.float64)})
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows *= torch.tensor(lengths, dtype=torch.float64)[:, None]
    summing, state = releaser(mechanism, layout, 0.0, float(n)), mechanism.init(layout)
    for _ in range(2):  # the second time in other coordinates, where AdaCliP has any
        total = summing.start(state)
        total.add(DenseRows(rows))
        release = summing.release(total)
        wanted = mechanism.bound(rows, state, layout).mean(0)
        assert torch.allclose(release.mean, wanted, rtol=1e-9, atol=1e-12)
        state = {**release.state, "s": torch.linspace(0.1, 2.0, d).double()} if state else {}


@dataclass(frozen=True)
class AsWideAsRows(ScalingMechanism):
    """Rows of any length up to the root of their width."""

    def radius(self, round_state: State, d: int) -> float:
        return d**0.5

    def scales(self, norms: Tensor, round_state: State, unit: Tensor | float) -> Tensor:
        return torch.ones_like(norms) * unit


def test_a_bound_that_depends_on_the_width_of_rows_is_the_same_for_factored_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, delta = (torch.randn(5, size, generator=generator) for size in (7, 4))
    rows = OuterRows((LinearPart(x, delta * torch.tensor([[0.5], [1], [2], [3], [9]])),))
    means = []
    for form in (rows, DenseRows(rows.dense())):
        summing = releaser(AsWideAsRows(), layout_of_rows(rows.dense()), 0.0, 5.0)
        total = summing.start({})
        total.add(form)
        means.append(summing.release(total).mean)
    torch.testing.assert_close(*means, rtol=1e-5, atol=1e-6)

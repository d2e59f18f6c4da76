"""Rows of clamped numbers: their norms, and the means and quantiles that sums of them give."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.errors import FedsimError
from fedsim.mechanisms.bounded_values import (
    BINS,
    QUANTILES,
    ValueRange,
    joint_norm,
    joint_rows,
    split_sums,
)

NUMBERS = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40)


@given(NUMBERS, st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.booleans())
def test_no_number_makes_a_row_longer_than_it_says(
    numbers: list[float], low: float, width: float, quantiles: bool
) -> None:
    ranges = [ValueRange("a", low, low + width, quantiles), ValueRange("b", -1.0, 1.0)]
    values = {"a": np.array(numbers), "b": np.array(numbers[::-1])}
    rows = joint_rows(ranges, values, len(numbers))
    assert np.linalg.norm(rows, axis=1).max() <= joint_norm(ranges) * (1 + 1e-12)
    # So is a client's mean row over many numbers.
    assert np.linalg.norm(rows.mean(0)) <= joint_norm(ranges) * (1 + 1e-12)
    absent = np.isnan(values["a"]) & np.isnan(values["b"])
    assert not rows[absent].any()


@given(NUMBERS, st.floats(-10, 10), st.floats(0.1, 20))
def test_the_sum_of_rows_gives_the_mean_of_clamped_numbers(
    numbers: list[float], low: float, width: float
) -> None:
    one, values = ValueRange("a", low, low + width), np.array(numbers)
    there = np.clip(values[~np.isnan(values)], one.low, one.high)
    sums = one.rows(values).sum(0)
    assert one.count(sums) == pytest.approx(len(there))
    if len(there):
        assert one.mean(sums) == pytest.approx(there.mean(), abs=1e-9 * (1 + abs(low) + width))
    else:
        assert math.isnan(one.mean(sums))


def test_quantiles_are_right_to_a_bin_without_noise() -> None:
    one, rng = ValueRange("a", -2.0, 6.0, quantiles=True), np.random.default_rng(1)
    for values in (rng.normal(2, 1, 5000), rng.uniform(-2, 6, 500), np.full(30, 1.3)):
        sums = one.rows(values).sum(0)
        found = dict(one.summary(sums))
        assert list(found) == list(one.result_names) == ["a", "a-p10", "a-median", "a-p90"]
        for name, share in QUANTILES.items():
            wanted = np.quantile(np.clip(values, -2, 6), share)
            assert found[f"a-{name}"] == pytest.approx(wanted, abs=8 / BINS)


def test_noise_moves_means_and_quantiles_by_what_the_formula_says() -> None:
    one, rng = ValueRange("a", 0.0, 1.0, quantiles=True), np.random.default_rng(2)
    values, noise = rng.beta(4, 2, 1000), 12.0
    sums = one.rows(values).sum(0)
    noisy = [sums + noise * rng.normal(size=one.size) for _ in range(2000)]
    found = np.array([one.mean(s) for s in noisy])
    assert found.mean() == pytest.approx(values.mean(), abs=4 * found.std() / math.sqrt(2000))
    expected = one.mean_error(values.mean(), noise, 1000)
    assert found.std() == pytest.approx(expected, rel=0.06)  # sd of a deviation is 1.6 %
    # Cumulative counts: rows of A C^-1, less than half of what plain counts would carry.
    exact = one.cumulative(sums)
    spread = np.std([one.cumulative(s) - exact for s in noisy], axis=0)
    assert spread.max() * 1000 < noise * math.sqrt(BINS) / 2


def test_parts_of_a_row_come_apart_again() -> None:
    ranges = [ValueRange("b", 0.0, 1.0, quantiles=True), ValueRange("a", 0.0, 2.0)]
    rows = joint_rows(ranges, {"a": np.array([0.5, 1.5]), "b": np.array([1.0, np.nan])}, 2)
    sums = split_sums(ranges, rows.sum(0))
    assert ranges[1].mean(sums["a"]) == 1.0
    assert (ranges[0].count(sums["b"]), ranges[0].mean(sums["b"])) == (1.0, 1.0)
    assert joint_norm(ranges) == math.sqrt(3)


@pytest.mark.parametrize("ends", [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_a_range_has_two_ends(ends: tuple[float, float]) -> None:
    with pytest.raises(FedsimError, match="its first number the smaller"):
        ValueRange("loss", *ends)

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.rows.exact import MAX_ROWS, UNBOUNDED_UNIT, GridSum, GridSums


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def grid_of(radius: float, size: int, **settings: object) -> GridSum:
    return GridSum(torch.tensor(radius, dtype=torch.float64), size, **settings)


@pytest.mark.parametrize("radius", [1e-30, 0.3, 1.0, 7.0, 1e30])
def test_the_grid_is_a_power_of_two_no_coarser_than_c_over_2_to_the_30(radius: float) -> None:
    unit = float(grid_of(radius, 1).unit)
    assert math.frexp(unit)[0] == 0.5
    assert radius * 2.0**-31 < unit <= radius * 2.0**-30


def test_sums_are_exact_up_to_the_last_row_allowed_and_refused_beyond() -> None:
    grid = grid_of(1.9999999, 1)
    sums = GridSums({"sum": grid}, MAX_ROWS, torch.device("cpu"))
    largest = math.floor(float(grid.radius / grid.unit))
    for _ in range(4):
        sums.expect(2**20)
        grid.add_(torch.full((2**20, 1), float(largest), dtype=torch.float64))
    assert int(sums.state()["rows"]) == MAX_ROWS
    assert largest * MAX_ROWS < 2**53
    assert int(grid.value() / grid.unit) == largest * MAX_ROWS
    with pytest.raises(FedsimError, match="rows"):
        sums.expect(1)


def test_rows_are_rounded_towards_zero() -> None:
    grid = grid_of(1.0, 4)
    grid.add_(tensor(1.7, -1.7, 0.99, -0.99)[None])
    assert (grid.value() / grid.unit).tolist() == [1.0, -1.0, 0.0, 0.0]


def test_what_a_float64_row_loses_to_the_coarse_grid_is_kept_where_no_noise_is_added() -> None:
    value = tensor(0.1234567890123456)[None]
    grid = grid_of(1.0, 1, fine_bits=30)
    grid.add_(value / grid.unit)
    assert grid.value().item() == pytest.approx(value.item(), abs=2e-17)
    assert grid.on_grid().item() == math.floor(float(value / grid.unit))


def test_a_free_sum_keeps_small_and_large_rows_apart() -> None:
    free = GridSum.unbounded(torch.zeros((), dtype=torch.float64), 2)
    rows = torch.stack([tensor(1e6, 2.0**-40), tensor(-1e6, 2.0**-41)])
    free.add_(rows / UNBOUNDED_UNIT)
    assert free.value().tolist() == [0.0, 1.5 * 2.0**-40]


def test_sums_that_nobody_merges_are_rounded_once_and_sums_without_noise_never() -> None:
    rows = torch.full((2, 3), 1.25, dtype=torch.float64)
    for rounding, total in (("all", 6.0), ("rows", 7.0), ("none", 7.5)):
        grid = grid_of(1.0, 3, rounding=rounding)
        grid.add_(rows.clone())
        for _ in range(2):
            grid.add_sum_(rows.sum(0))
        assert grid.on_grid().tolist() == [total] * 3


def test_rows_of_some_owners_go_into_their_sums_alone() -> None:
    rows = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0)).double() * 100
    for fine_bits in (0, 30):
        together, apart = (
            GridSum(torch.ones(4, dtype=torch.float64), 3, fine_bits=fine_bits) for _ in range(2)
        )
        together.add_(rows.clone())
        for owners in (slice(1, 3), torch.tensor([3, 0])):
            apart.add_(rows[owners].clone(), owners)
        assert torch.equal(together.value(), apart.value())

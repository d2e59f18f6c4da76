"""Rows start on cache lines, wherever their memory comes from."""

from __future__ import annotations

import pytest
import torch

from fedsim.rows.packing import LINE, empty_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_rows_of_a_block_start_on_a_cache_line_and_may_be_written_to(
    n: int, dtype: torch.dtype
) -> None:
    kept = [empty_rows(n, 64, dtype) for _ in range(20)]
    for number, rows in enumerate(kept):
        assert rows.data_ptr() % LINE == 0
        assert rows.is_contiguous()
        rows.fill_(number)
    for number, rows in enumerate(kept):
        assert rows.dtype == dtype
        assert rows.shape == (n, 64)
        assert (rows == number).all()

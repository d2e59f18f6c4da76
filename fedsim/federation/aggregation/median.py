"""The median of each coordinate."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.federation.aggregation.robust_mean import RobustMean, column_chunks
from fedsim.lazy import Tensor, torch
from fedsim.registry import register


@register("mechanism", "median")
@dataclass(frozen=True)
class Median(RobustMean):
    """The median of each coordinate over clients (Yin et al. 2018); of two, their mean.

    Of n rows, (n - 1) / 2 rounded down may be anything at all. No privacy.
    """

    def center(self, rows: Tensor) -> Tensor:
        """The median of each coordinate."""
        n = len(rows)
        middle = slice((n - 1) // 2, n // 2 + 1)
        return torch.cat(
            [columns.sort(0).values[middle].mean(0) for columns in column_chunks(rows)]
        )

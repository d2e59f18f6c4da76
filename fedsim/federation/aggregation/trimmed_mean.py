"""The mean of each coordinate without its extremes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.federation.aggregation.robust_mean import RobustMean, column_chunks
from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.settings import Doc, Ge, Lt


@register("mechanism", "trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(RobustMean):
    """The mean of each coordinate over clients, without the largest and the smallest of them.

    Of n rows, trim times n, rounded down, may be anything at all. No privacy. Source: Yin et al.
    2018.
    """

    trim: Annotated[
        float, Ge(0), Lt(0.5), Doc("The share of clients that is left out at either end.")
    ] = 0.1

    def center(self, rows: Tensor) -> Tensor:
        """The mean of what is between the extremes of each coordinate."""
        left_out = int(self.trim * len(rows))
        kept = slice(left_out, len(rows) - left_out)
        return torch.cat([columns.sort(0).values[kept].mean(0) for columns in column_chunks(rows)])

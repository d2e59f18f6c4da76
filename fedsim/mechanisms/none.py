"""No privacy: the weighted mean of federated averaging."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import (
    BoundedRows,
    Guarantee,
    NoiselessSum,
    SimpleMechanism,
    State,
    Weighting,
)
from fedsim.registry import register
from fedsim.rows.dense import Weights, row_weights
from fedsim.rows.exact import MAX_NORM_TOTAL
from fedsim.rows.norms import norms_of

MAX_NORM = 2.0**20
"""Norm above which a row counts as diverged."""
WEIGHT_UNIT = 2.0**-20
WEIGHTED_NORM_UNIT = 2.0**-16
"""Unit of the sum of weight times norm, which bounds every coordinate of the sum of rows."""


@register("mechanism", "none")
@dataclass(frozen=True)
class NoPrivacy(SimpleMechanism):
    """The weighted mean of the rows, as in FedAvg. No guarantee of any kind.

    Rows are summed at a resolution of 2^-48 and weights at one of 2^-20, so that the mean has
    the same bytes for any order and any block size. A row longer than 2^20 has diverged: it
    is rejected and counted, like one that is not finite. The sum is divided by the sum of the
    weights; the mean over no rows is zero.
    """

    weighting: Weighting = "num-examples"
    """The weights of the mean: each client's number of examples, as in FedAvg, or uniform."""

    guarantee: ClassVar[Guarantee] = "none"
    no_noise: ClassVar[str] = (
        "noise protects only what a mechanism bounds; choose one such as 'clipping'"
    )
    """Why noise would protect nobody."""
    unbounded: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = True
    noiseless_sums: ClassVar[Mapping[str, NoiselessSum]] = {
        "weight": NoiselessSum(WEIGHT_UNIT),
        "reach": NoiselessSum(WEIGHTED_NORM_UNIT),  # weight times norm
    }

    def split(self, noise_multiplier: float, denominator: float) -> Mapping[str, float]:
        """No noise: a plan with any is refused."""
        return {"sum": 0.0}

    def radius(self, round_state: State, d: int) -> float:
        """Infinite: there is no bound."""
        return math.inf

    def weights(self, weights: Weights | None, count: int, device: torch.device) -> Tensor:
        """Validated weights up to 2^32, rounded to multiples of 2^-20."""
        if weights is None and self.weighting == "num-examples":
            raise FedsimError("weighting is 'num-examples'; the rows came without weights.")
        checked = row_weights(weights, count, device, highest=2.0**32)
        if self.weighting == "uniform":
            return (checked > 0).to(torch.float64)
        return torch.round(checked / WEIGHT_UNIT) * WEIGHT_UNIT

    def bound_(self, y: Tensor, round_state: State) -> BoundedRows:
        """Factor 1 for all rows, NaN for one that has diverged."""
        norms = norms_of(y)
        factor = torch.where(norms <= MAX_NORM, 1.0, torch.nan)
        scalars = {"weight": torch.ones_like(factor), "reach": norms}
        return BoundedRows(factor, torch.zeros_like(factor, dtype=torch.bool), scalars)

    def divisor(self, noiseless_sums: Mapping[str, Tensor], denominator: Tensor) -> Tensor:
        """The sum of the actual weights, not a declared number.

        Raises
        ------
        FedsimError
            If weights times norms are too large for an exact sum.
        """
        # Only now is it known whether all partial sums were small enough to be exact.
        weighted_norm = float(noiseless_sums["reach"].max())
        if weighted_norm > MAX_NORM_TOTAL:
            raise FedsimError(
                f"weights times norms of the updates add up to {weighted_norm:g}; an exact mean "
                f"allows {MAX_NORM_TOTAL:g}."
            )
        return torch.where(noiseless_sums["weight"] > 0, noiseless_sums["weight"], 1.0)

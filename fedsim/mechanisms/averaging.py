"""No privacy: the weighted mean of federated averaging."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms.base import (
    Accumulator,
    Counts,
    Guarantee,
    Mechanism,
    Release,
    Shares,
    State,
    Weighting,
    Weights,
    row_weights,
)
from fedsim.mechanisms.exact import FreeSum
from fedsim.mechanisms.noise import NoiseSource
from fedsim.rows.dense import Chunks, Rows, chunks
from fedsim.rows.layout import Layout

__all__ = ["NoPrivacy"]

MAX_NORM = 2.0**20
WEIGHT_UNIT = 2.0**-20


@dataclass(frozen=True)
class NoPrivacy(Mechanism):
    """The mean of the rows, weighted, as in FedAvg. No guarantee of any kind.

    Rows are summed to a resolution of 2^-48 and weights to one of 2^-20, so that the mean has
    the same bytes for any order and any block size. A row longer than 2^20 has diverged: it
    is rejected and counted, like one that is not finite.

    Parameters
    ----------
    weighting : "uniform" or "num-examples"
        Whether the weights given to the sum are used, or only say who takes part.
    """

    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        if self.weighting not in ("uniform", "num-examples"):
            raise FedsimError(
                f"weighting is '{self.weighting}'; it must be 'uniform' or 'num-examples'."
            )

    @property
    def guarantee(self) -> Guarantee:
        """``"none"``."""
        return "none"

    def noise_multipliers(
        self, noise_multiplier: float, denominator: float, state: State | None = None
    ) -> Mapping[str, float]:
        """None; anything but 0 is refused."""
        if noise_multiplier != 0:
            raise FedsimError(
                f"noise-multiplier is {noise_multiplier}; without a bound on rows it must be 0."
            )
        return {"sum": 0.0}

    def sensitivity(self, state: State, layout: Layout) -> float:
        """Unbounded."""
        return math.inf

    def bound(self, block: Tensor, state: State | None = None) -> Tensor:
        """The block itself, with rows that would be rejected set to zero."""
        out = block.clone()
        for part, y in chunks(block):
            out[part].masked_fill_(~(_norms(y) <= MAX_NORM)[:, None], 0.0)
        return out

    def accumulate(
        self, state: State, layout: Layout, *, device: torch.device | str = "cpu"
    ) -> Accumulator:
        """An empty weighted sum."""
        return _WeightedSum(self.weighting, layout.d, device)

    def release(
        self,
        state: State,
        total: Accumulator,
        *,
        noise_multiplier: float = 0.0,
        denominator: float = 1.0,
        noise: NoiseSource | None = None,
        asked: int | None = None,
    ) -> Release:
        """Divide by the realised weights; ``denominator`` and ``noise`` are not used.

        The mean over no rows is zero.
        """
        if not isinstance(total, _WeightedSum):
            raise TypeError(f"total is a {type(total).__name__}, not made by accumulate().")
        self.noise_multipliers(noise_multiplier, denominator)
        weight = total.weight
        return Release(total.sum.value() / (weight if weight > 0 else 1.0), state)

    def share(
        self,
        block: Tensor,
        state: State,
        *,
        noise_multiplier: float,
        denominator: float,
        asked: int,
        noise: Sequence[NoiseSource],
        sides: Mapping[str, Weights] | None = None,
    ) -> Shares:
        """Refused: there is no noise to share."""
        raise FedsimError("noise placement is 'client'; without a mechanism there is no noise.")


class _WeightedSum(Accumulator):
    def __init__(self, weighting: Weighting, size: int, device: torch.device | str) -> None:
        self._weighting = weighting
        self.sum = FreeSum(size, device=device)
        self._chunks = Chunks()
        self._reach = torch.zeros((), dtype=torch.float64, device=device)
        self._weight = torch.zeros((), dtype=torch.float64, device=device)
        self._counts = Counts()

    @property
    def count(self) -> int:
        return self._counts.total(0)

    @property
    def rejected(self) -> int:
        return self._counts.total(1)

    @property
    def clipped(self) -> int:
        return 0

    @property
    def weight(self) -> float:
        """Sum of the weights.

        Raises
        ------
        FedsimError
            If weights times norms are too large for an exact sum.
        """
        if float(self._reach) > FreeSum.MAX_TOTAL:
            raise FedsimError(
                f"weights times norms of the updates add up to {float(self._reach):g}; an exact "
                f"mean allows {FreeSum.MAX_TOTAL:g}."
            )
        return float(self._weight)

    def add(
        self,
        rows: Rows,
        *,
        weights: Weights | None = None,
        sides: Mapping[str, Weights] | None = None,
    ) -> Tensor:
        block = rows.dense()
        if weights is None and self._weighting == "num-examples":
            raise FedsimError("weighting is 'num-examples'; the rows came without weights.")
        given = row_weights(weights, len(block), block.device, highest=2.0**32)
        if given is None:
            given = torch.ones(len(block), dtype=torch.float64, device=block.device)
        elif self._weighting == "uniform":
            given = (given > 0).to(torch.float64)
        given = torch.round(given / WEIGHT_UNIT) * WEIGHT_UNIT
        usable = torch.empty(len(block), dtype=torch.bool, device=block.device)
        for part, y in self._chunks.of(block):
            usable[part] = self._add(y, given[part])
        return usable

    def _add(self, y: Tensor, weight: Tensor) -> Tensor:
        norms = _norms(y)
        bad = ~(norms <= MAX_NORM)
        if y.is_cuda or bool(bad.any()):
            y.masked_fill_(bad[:, None], 0.0)
        present = ~bad & (weight > 0)
        weight = torch.where(present, weight, 0.0)
        self._reach += (weight * torch.where(bad, 0.0, norms)).sum()
        self._weight += weight.sum()
        self._counts.add(present, bad)
        self.sum.add_(y.mul_(weight[:, None] * FreeSum.SCALE))
        return present

    def add_shares(self, shares: Shares) -> None:
        raise FedsimError("noise placement is 'client'; without a mechanism there is no noise.")


def _norms(y: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(y, dim=1)
    return norms

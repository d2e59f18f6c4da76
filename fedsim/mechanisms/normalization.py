"""Normalisation: every row is scaled to the same norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import NORM, State
from fedsim.mechanisms.scaling import ScalingMechanism
from fedsim.registry import register
from fedsim.settings import Interval


@register("mechanism", "normalization")
@dataclass(frozen=True)
class Normalization(ScalingMechanism):
    """``C * u / (||u|| + smoothing)``, and 0 for u = 0 (Das et al. 2021).

    With ``smoothing > 0`` this is the smooth form of AUTO-S (Bu et al. 2023) and alpha-NormEC.
    Without it, even a row of rounding errors is scaled to norm C.

    Guarantee: the sum changes by at most C in L2 norm when a row is added or removed. By how much
    does not depend on the row's length. For any row::

        norm 0                        0
        any other norm, however small C in norm, or C norm / (norm + smoothing)
        an entry NaN or infinite      0
        C = 0, C = inf                refused: C is from 1e-30 to 1e9
    """

    clip_norm: Annotated[float, NORM] = 1.0
    """C, the L2 norm to which every row is scaled."""
    smoothing: Annotated[float, Interval(ge=0.0, le=1e30)] = 0.0
    """kappa, added to a row's norm before dividing by it: rows much shorter than this stay
    short."""

    def scales(self, norms: Tensor, round_state: State, unit: Tensor | float) -> Tensor:
        """``C / (norm + smoothing)``, or 0 for a norm of 0."""
        smooth = norms if self.smoothing == 0 else norms + self.smoothing / unit
        return torch.where(norms == 0, 0.0, self.clip_norm / smooth)

    def radius(self, round_state: State, d: int) -> float:
        """C."""
        return self.clip_norm

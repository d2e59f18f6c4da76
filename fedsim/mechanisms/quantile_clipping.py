"""Clipping at a privately tracked quantile of the rows' norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import BOUND_RANGE, NORM, Released, ScalarRange, State, per_row
from fedsim.mechanisms.scaling import ScalingMechanism, clip_factor
from fedsim.registry import register
from fedsim.rows.layout import Layout
from fedsim.settings import Ge, Interval, Le

BIT = "unclipped"


@register("mechanism", "quantile-clipping")
@dataclass(frozen=True)
class QuantileClipping(ScalingMechanism):
    """Clipping whose C follows a quantile of the norms (Andrew et al. 2021).

    Each row gives a bit: whether its norm is at most this round's C. The noisy share ``b`` of such
    rows updates C: ``C <- C * exp(-learning_rate * (b - target_quantile))``. Bit, clip and noise
    all use the C from before the round. The bit is centred, so that adding a row changes the sum
    of bits by 1/2 only, and

        ``b = 1/2 + (sum of (bit - 1/2) + N(0, (bit_noise * r)^2)) / r``

    with the fixed denominator r. The fixed point is the true quantile, from either side.

    Guarantee: vector and bit together are one Gaussian of multiplier z on a sum of sensitivity
    C; the vector's own multiplier is ``(z^-2 - (2 * bit_noise * r)^-2)^(-1/2)``.
    """

    target_quantile: Annotated[float, Ge(0), Le(1)] = 0.5
    """The target share of rows no longer than C; 0.5 for the median."""
    learning_rate: Annotated[float, Ge(0), Le(100)] = 0.2
    """The learning rate of C: its logarithm changes by at most this much a round."""
    initial_clip_norm: Annotated[float, NORM] = 0.1
    """C of the first round; one that is too small is corrected faster than one that is too
    large."""
    bit_noise: Annotated[float, Interval(ge=1e-6, le=1e6)] = 0.05
    """Standard deviation of the noise on the share of rows that are no longer than C."""

    scalars: ClassVar[Mapping[str, ScalarRange]] = {BIT: ScalarRange(center=0.5, half=0.5)}

    def init(self, layout: Layout) -> State:
        """``clip_norm``: C, float64 scalar."""
        return {"clip_norm": torch.tensor(self.initial_clip_norm, dtype=torch.float64)}

    def split(self, noise_multiplier: float, denominator: float) -> Mapping[str, float]:
        """The bit has the multiplier ``2 * bit_noise * denominator``, the vector the rest."""
        if noise_multiplier == 0:
            return {"sum": 0.0, BIT: 0.0}
        # The noise on the sum of bits is bit_noise * denominator, and a bit's sensitivity 1/2.
        bit = 2 * self.bit_noise * denominator
        if not noise_multiplier < bit:
            raise FedsimError(
                f"noise-multiplier is {noise_multiplier:g}; with bit-noise {self.bit_noise:g} and "
                f"{denominator:g} expected rows it must be below {bit:g}: choose a larger "
                "bit-noise, or a larger cohort (client.batch-size if rows are examples)."
            )
        return {"sum": (noise_multiplier**-2 - bit**-2) ** -0.5, BIT: bit}

    def scales(self, norms: Tensor, round_state: State, unit: Tensor | float) -> Tensor:
        """``min(1, C / norm)`` at this round's C."""
        return clip_factor(norms, per_row(round_state["clip_norm"]), unit)

    def radius(self, round_state: State, d: int) -> Tensor:
        """This round's C."""
        return round_state["clip_norm"]

    def row_scalars(self, clipped: Tensor) -> Mapping[str, Tensor]:
        """The bit, centred."""
        return {BIT: 0.5 - clipped.to(torch.float64)}

    def next(self, state: State, round_state: State, released: Released) -> State:
        """C, updated by the noisy share of unclipped rows."""
        step = -self.learning_rate * (released.side_scalars[BIT] - self.target_quantile)
        low, high = BOUND_RANGE
        # In logarithms: with a tiny cohort, noise may make a step for which exp() overflows.
        log_c = (state["clip_norm"].log() + step).clamp(math.log(low), math.log(high))
        return {"clip_norm": log_c.exp().clamp(low, high)}

    def info(self, round_state: State, new: State, d: int) -> dict[str, float]:
        """C of this round and of the next."""
        return {
            "clip-norm": float(round_state["clip_norm"]),
            "next-clip-norm": float(new["clip_norm"]),
        }

"""Bounds and noise per coordinate that adapt to earlier releases (Xu et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import (
    NORM,
    BoundedRows,
    Guarantee,
    NoiselessSum,
    Released,
    SimpleMechanism,
    State,
)
from fedsim.mechanisms.coordinate_clipping import clamp_
from fedsim.mechanisms.scaling import clip_factor
from fedsim.registry import register
from fedsim.rows.exact import UNBOUNDED_UNIT
from fedsim.rows.layout import Layout
from fedsim.rows.norms import norms_, round_up
from fedsim.settings import Ge, Interval, Le


@register("mechanism", "adaptive-noise")
@dataclass(frozen=True)
class AdaptiveNoise(SimpleMechanism):
    """Bounds and noise per coordinate from a moving average of squares (Xu et al. 2020).

    In the first phase, while the variance of E across the coordinates is at most the threshold,
    rows are clipped at C. In the second, coordinate i is clamped to ``s_i = beta * sqrt(E_i)``,
    and its noise has standard deviation ``z * sqrt(d) * s_i``, or ``z * sqrt(s_i * sum(s))``
    (Lemma 1: both are as private as z at sensitivity 1, as ``sum s_i^2 / sigma_i^2 = 1 / z^2``).
    Noise is added once, to the sum.

    Guarantee: one Gaussian of multiplier z on a sum of sensitivity C, or 1 in coordinates
    divided by the noise's shape. E is computed from *released* means, minus their noise's
    variance: post-processing. In the paper E is computed from raw gradients, and bounds, noise and
    the phase depend on them: a coordinate that only one record uses is released without noise.
    That form has no guarantee with any noise, and requires a flag.

    RMSProp, the other half of the paper's method, is left to the optimiser.
    """

    clip_norm: Annotated[float, NORM] = 1.0
    """C, the clip norm of the first phase."""
    threshold: Annotated[float | None, Ge(0)] = None
    """G: the variance above which the second phase begins; unset, it never does. Variances of
    mean squares are small: 1e-9 on MNIST."""
    beta: Annotated[float, Interval(ge=1e-12, le=1e12)] = 1.0
    """The bound of a coordinate divided by its root mean square. E is of means of r rows, so that
    single rows may need a value near sqrt(r)."""
    decay: Annotated[float, Ge(0), Le(1)] = 0.9
    """gamma', the weight of the old E; the paper does not say which."""
    floor: Annotated[float, Interval(ge=1e-60, le=1e60)] = 1e-12
    """The smallest value of E, so that no bound is zero."""
    noise_shape: Literal["proportional", "optimal"] = "proportional"
    """The paper's noise ('proportional'), or the equally private one of least total variance
    ('optimal', Lemma 1)."""
    switch: Literal["mean-square", "root"] = "mean-square"
    """Whether the threshold is compared with the variance of E ('mean-square') or of sqrt(E)
    ('root'). Both tests are in print; their thresholds are on different scales."""
    unsafe_non_private_raw_statistics: bool = False
    """Estimate E from raw rows, as printed in the paper: that form has no privacy guarantee,
    whatever the noise."""

    # Clients do not need the noise's shape, which the server multiplies by.
    bounding_entries: ClassVar[tuple[str, ...]] = ("adaptive", "shrink", "stretch")

    @property
    def guarantee(self) -> Guarantee:
        """``"none"`` with raw statistics."""
        return "none" if self.unsafe_non_private_raw_statistics else "gaussian"

    def init(self, layout: Layout) -> State:
        """``mean_square``: E, float64 ``[d]``, zero."""
        return {"mean_square": torch.zeros(layout.d, dtype=torch.float64)}

    @property
    def noiseless_sums(self) -> Mapping[str, NoiselessSum]:
        """The raw rows, in the paper's form."""
        raw = {"raw": NoiselessSum(UNBOUNDED_UNIT, wide=True)}
        return raw if self.unsafe_non_private_raw_statistics else {}

    def round_state(self, state: State) -> State:
        """Which owners are in the second phase, and for these the bounds and the noise's shape."""
        mean_square = state["mean_square"]
        tested = mean_square.clamp_min(0)
        if self.switch == "root":
            tested.sqrt_()
        # A mask instead of a branch: the clients of a block may be in different phases.
        threshold = math.inf if self.threshold is None else self.threshold
        adaptive = tested.var(-1, correction=0, keepdim=True) > threshold
        if not adaptive.is_cuda and not bool(adaptive.any()):
            return {"adaptive": adaptive}
        limit = mean_square.clamp_min(self.floor).sqrt_().mul_(self.beta)
        if self.noise_shape == "proportional":
            shape = limit * math.sqrt(limit.shape[-1])
        else:
            shape = torch.sqrt(limit * limit.sum(-1, keepdim=True))
        # Rows are divided by the bounds and clamped to 1 (shrink), then brought to units of the
        # noise (stretch), in which the noise is isotropic and their norm at most 1.
        round_state = {"shrink": 1 / limit, "stretch": limit / shape, "shape": shape}
        if adaptive.is_cuda or not bool(adaptive.all()):
            round_state = {
                name: torch.where(adaptive, vector, 1.0) for name, vector in round_state.items()
            }
        return {**round_state, "adaptive": adaptive}

    def radius(self, round_state: State, d: int) -> Tensor:
        """C, or 1 in coordinates divided by the noise's shape."""
        adaptive = round_state["adaptive"].squeeze(-1)
        radius = torch.full_like(adaptive, self.clip_norm, dtype=torch.float64)
        return radius.masked_fill_(adaptive, 1.0)

    def bound_(self, y: Tensor, round_state: State) -> BoundedRows:
        """Clip in the first phase; clamp and divide by the noise's shape in the second."""
        adaptive = round_state["adaptive"]
        noiseless_sums = {"raw": y.clone()} if self.noiseless_sums else {}
        # On a CPU, where reading a value is cheap, a phase that no owner is in is skipped.
        first, second = y.is_cuda or not bool(adaptive.all()), "shrink" in round_state
        factor = torch.ones(y.shape[:-1], dtype=torch.float64, device=y.device)
        clipped = torch.zeros_like(factor, dtype=torch.bool)
        if second:
            y.mul_(round_state["shrink"].unsqueeze(-2))
            factor, clipped, _ = clamp_(y, adaptive if first else None)
            y.mul_(round_state["stretch"].unsqueeze(-2))
        if first:
            norms, unit = norms_(y)
            limit = self.radius(round_state, 0).unsqueeze(-1).masked_fill_(adaptive, math.inf)
            factor = factor * clip_factor(round_up(norms, y.shape[-1]), limit, unit)
            clipped = clipped | (norms * unit > limit)
        return BoundedRows(factor, clipped, noiseless_sums)

    def restore(self, w: Tensor, round_state: State) -> Tensor:
        """Multiply by the noise's shape."""
        return w * round_state["shape"] if "shape" in round_state else w

    def next(self, state: State, round_state: State, released: Released) -> State:
        """Moving average of squares of the released mean, minus its noise's variance."""
        if self.noiseless_sums:
            square = (released.noiseless_sums["raw"] / released.denominator).square_()
        else:
            std = released.noise_multiplier / released.denominator
            spread = self.radius(round_state, 0).unsqueeze(-1)
            if "shape" in round_state:
                spread = torch.where(round_state["adaptive"], round_state["shape"], spread)
            square = released.mean.square().sub_((spread * std).square_())
        square.mul_(1 - self.decay).add_(state["mean_square"] * self.decay)
        return {"mean_square": square}

    def info(self, round_state: State, new: State, d: int) -> dict[str, float]:
        """``adaptive``: 1 in the second phase, else 0."""
        return {"adaptive": float(round_state["adaptive"])}

"""Bounds on each coordinate: fixed ones, and Xu's adaptive ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms.base import (
    BOUND_RANGE,
    Bound,
    Guarantee,
    Released,
    Shaped,
    State,
    check_number,
)
from fedsim.mechanisms.scaling import clip_factor
from fedsim.rows.dense import norms_, round_up
from fedsim.rows.layout import Layout

__all__ = ["AdaptiveNoise", "CoordinateClipping"]

# Rounding of products of d bounds; a bounded row must not exceed its radius by it.
SLACK = 1 - 2.0**-40


def _clamp_(y: Tensor, only: Tensor | None = None) -> Shaped:
    """Clamp rows ``y [..., c, d]`` to +- 1; the factor is 1, and NaN for non-finite rows.

    ``only``, bool ``[..., 1]``, says whose rows are clamped: everybody's by default.
    """
    # Ten times as fast on CPU as the infinity norm, and as true to NaN.
    peaks = torch.maximum(y.amax(-1), -y.amin(-1))
    clipped = peaks > 1
    if only is None:
        y.clamp_(-SLACK, SLACK)
    else:
        y.copy_(torch.where(only.unsqueeze(-2), y.clamp(-SLACK, SLACK), y))
        clipped = clipped & only
    factor = torch.ones_like(peaks).masked_fill_(~torch.isfinite(peaks), torch.nan)
    return Shaped(factor, clipped, {})


@dataclass(frozen=True)
class CoordinateClipping(Bound):
    """Each coordinate clamped to ``[-clip_value, clip_value]`` (Shokri and Shmatikov 2015).

    Guarantee: the sum changes by at most ``C = clip_value * sqrt(d)`` in L2 norm when a row is
    added or removed; every coordinate's noise has standard deviation ``z * C``.

    Parameters
    ----------
    clip_value : float
    """

    clip_value: float

    shows: ClassVar[tuple[str, ...]] = ("clip-norm",)

    def __post_init__(self) -> None:
        check_number("clip-value", self.clip_value, *BOUND_RANGE)

    def radius(self, ready: State, d: int) -> float:
        """``clip_value * sqrt(d)``."""
        return self.clip_value * math.sqrt(d)

    def shape_(self, y: Tensor, ready: State) -> Shaped:
        """Clamp."""
        shaped = _clamp_(y.div_(self.clip_value))
        return shaped._replace(factor=shaped.factor * self.clip_value)

    def info(self, ready: State, new: State, d: int) -> dict[str, float]:
        """C."""
        return {"clip-norm": self.radius(ready, d)}


@dataclass(frozen=True)
class AdaptiveNoise(Bound):
    """Bounds and noise per coordinate from a moving average of squares (Xu et al. 2020).

    While ``Var[sqrt(E)] <= threshold`` (across the coordinates) rows are clipped at C. Above it
    coordinate i is clamped to ``s_i = beta * sqrt(E_i)`` and its noise has standard deviation
    ``z * sqrt(d) * s_i``, or ``z * sqrt(s_i * sum(s))`` (Lemma 1: either is as private as z at
    sensitivity 1, as ``sum s_i^2 / sigma_i^2 = 1 / z^2``). Noise is drawn once, on the sum.

    Guarantee: one Gaussian of multiplier z on a sum of sensitivity C, or 1 in coordinates
    divided by the noise's shape. E is made of *released* means, less their noise's variance:
    post-processing. As printed it is made of raw gradients, on which then bounds, noise and the
    test depend: a coordinate that only one record uses is released without noise. That form
    has no guarantee, whatever its noise, and stands behind a flag.

    RMSProp, the other half of the paper's method, belongs to whoever steps the parameters.

    Parameters
    ----------
    clip_norm : float
        C of the first phase.
    threshold : float
        G; infinity keeps the first phase for good.
    beta : float
        Bounds over root mean squares; E is of means, so a row may need beta near sqrt(r).
    decay : float
        gamma', the weight of the old E; the paper does not say which.
    floor : float
        E is taken to be at least this, so that no bound is zero.
    noise_shape : "proportional" or "optimal"
        The paper's, or the one of least total variance under Lemma 1.
    unsafe_non_private_raw_statistics : bool
        The printed form. `guarantee` is then ``"none"``.
    """

    clip_norm: float
    threshold: float
    beta: float
    decay: float = 0.9
    floor: float = 1e-12
    noise_shape: Literal["proportional", "optimal"] = "proportional"
    unsafe_non_private_raw_statistics: bool = False

    # The noise's shape is the server's business.
    needs: ClassVar[tuple[str, ...]] = ("adaptive", "shrink", "stretch")
    shows: ClassVar[tuple[str, ...]] = ("adaptive",)

    def __post_init__(self) -> None:
        check_number("clip-norm", self.clip_norm, *BOUND_RANGE)
        check_number("threshold", self.threshold, 0.0, math.inf)
        check_number("beta", self.beta, 1e-12, 1e12)
        check_number("decay", self.decay, 0.0, 1.0)
        check_number("floor", self.floor, 1e-60, 1e60)
        if self.noise_shape not in ("proportional", "optimal"):
            raise FedsimError(
                f"noise-shape is '{self.noise_shape}'; it must be 'proportional' or 'optimal'."
            )

    @property
    def guarantee(self) -> Guarantee:
        """``"none"`` with raw statistics."""
        return "none" if self.unsafe_non_private_raw_statistics else "gaussian"

    def init(self, layout: Layout) -> State:
        """``mean_square``: E, float64 ``[d]``, zero."""
        return {"mean_square": torch.zeros(layout.d, dtype=torch.float64)}

    @property
    def keeps_raw(self) -> bool:
        """In the printed form."""
        return self.unsafe_non_private_raw_statistics

    def ready(self, state: State) -> State:
        """Whose phase is the second, and there the bounds and the noise's shape."""
        mean_square = state["mean_square"]
        root = mean_square.clamp_min(0).sqrt_()
        # A mask and no branch: clients of one block may be in either phase.
        adaptive = root.var(-1, correction=0, keepdim=True) > self.threshold
        if not adaptive.is_cuda and not bool(adaptive.any()):
            return {"adaptive": adaptive}
        limit = mean_square.clamp_min(self.floor).sqrt_().mul_(self.beta)
        if self.noise_shape == "proportional":
            shape = limit * math.sqrt(limit.shape[-1])
        else:
            shape = torch.sqrt(limit * limit.sum(-1, keepdim=True))
        # Rows are clamped in units of their bounds, then measured in units of their noise.
        own = {"shrink": 1 / limit, "stretch": limit / shape, "shape": shape}
        if adaptive.is_cuda or not bool(adaptive.all()):
            own = {name: torch.where(adaptive, each, 1.0) for name, each in own.items()}
        return {**own, "adaptive": adaptive}

    def radius(self, ready: State, d: int) -> Tensor:
        """C, or 1 in coordinates divided by the noise's shape."""
        return _either(ready["adaptive"], 1.0, self.clip_norm).squeeze(-1)

    def shape_(self, y: Tensor, ready: State) -> Shaped:
        """Clip, or clamp and divide, as the phase is."""
        adaptive = ready["adaptive"]
        # Where that can be read for nothing, a phase that is nobody's is left out.
        first, second = y.is_cuda or not bool(adaptive.all()), "shrink" in ready
        factor = torch.ones(y.shape[:-1], dtype=torch.float64, device=y.device)
        clipped = torch.zeros_like(factor, dtype=torch.bool)
        if second:
            y.mul_(ready["shrink"].unsqueeze(-2))
            factor, clipped, _ = _clamp_(y, adaptive if first else None)
            y.mul_(ready["stretch"].unsqueeze(-2))
        if first:
            norms, unit = norms_(y)
            limit = _either(adaptive, math.inf, self.clip_norm)
            clip = clip_factor(round_up(norms, y.shape[-1]), limit, 1.0 if unit is None else unit)
            factor = factor * clip
            clipped = clipped | ((norms if unit is None else norms * unit) > limit)
        return Shaped(factor, clipped, {})

    def restore(self, w: Tensor, ready: State) -> Tensor:
        """Times the noise's shape."""
        return w * ready["shape"] if "shape" in ready else w

    def next(self, state: State, ready: State, released: Released) -> State:
        """Moving average of squares of the released mean, less its noise's variance."""
        if released.raw_mean is not None:
            square = released.raw_mean.square()
        else:
            std = released.noise_multipliers["sum"] / released.denominator
            spread = self.radius(ready, 0).unsqueeze(-1)
            if "shape" in ready:
                spread = torch.where(ready["adaptive"], ready["shape"], spread)
            square = released.mean.square().sub_((spread * std).square_())
        square.mul_(1 - self.decay).add_(state["mean_square"] * self.decay)
        return {"mean_square": square}

    def info(self, ready: State, new: State, d: int) -> dict[str, float]:
        """1 in the second phase."""
        return {"adaptive": float(ready["adaptive"])}


def _either(mask: Tensor, yes: float, no: float) -> Tensor:
    """Float64 numbers ``yes`` and ``no``, as the mask says."""
    return torch.full_like(mask, no, dtype=torch.float64).masked_fill_(mask, yes)

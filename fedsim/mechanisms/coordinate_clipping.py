"""Coordinate-wise clipping: every coordinate is clamped to one range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import NORM, BoundedRows, SimpleMechanism, State
from fedsim.registry import register

# Margin for rounding in norms of d coordinates: a bounded row must not exceed its radius.
SLACK = 1 - 2.0**-40


def clamp_(y: Tensor, only: Tensor | None = None) -> BoundedRows:
    """Clamp rows ``y [..., c, d]`` to +- 1; the factor is 1, or NaN for non-finite rows.

    ``only``, bool ``[..., 1]``: the owners whose rows are clamped; by default all.
    """
    # Ten times as fast on a CPU as the infinity norm; NaN propagates too.
    peaks = torch.maximum(y.amax(-1), -y.amin(-1))
    clipped = peaks > 1
    if only is None:
        y.clamp_(-SLACK, SLACK)
    else:
        y.copy_(torch.where(only.unsqueeze(-2), y.clamp(-SLACK, SLACK), y))
        clipped = clipped & only
    factor = torch.ones_like(peaks).masked_fill_(~torch.isfinite(peaks), torch.nan)
    return BoundedRows(factor, clipped, {})


@register("mechanism", "coordinate-clipping")
@dataclass(frozen=True)
class CoordinateClipping(SimpleMechanism):
    """Each coordinate clamped to ``[-clip_value, clip_value]`` (Shokri and Shmatikov 2015).

    Guarantee: the sum changes by at most ``C = clip_value * sqrt(d)`` in L2 norm when a row is
    added or removed; every coordinate's noise has standard deviation ``z * C``.
    """

    clip_value: Annotated[float, NORM] = 0.01
    """The largest absolute value of a coordinate; C is this value times sqrt(d)."""

    def radius(self, round_state: State, d: int) -> float:
        """``clip_value * sqrt(d)``."""
        return self.clip_value * math.sqrt(d)

    def bound_(self, y: Tensor, round_state: State) -> BoundedRows:
        """Clamp coordinates, in units of ``clip_value``; the factor restores the unit."""
        shaped = clamp_(y.div_(self.clip_value))
        return shaped._replace(factor=shaped.factor * self.clip_value)

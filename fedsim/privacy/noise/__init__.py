"""Noise: one small file each."""

from __future__ import annotations

from fedsim.privacy.noise.base import (
    Noise,
    NoiseState,
    check_split,
    part_multiplier,
    share_multiplier,
    top_up_multiplier,
)
from fedsim.privacy.noise.independent import Independent

__all__ = [
    "Independent",
    "Noise",
    "NoiseState",
    "check_split",
    "part_multiplier",
    "share_multiplier",
    "top_up_multiplier",
]

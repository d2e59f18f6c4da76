"""Noise that a release adds to its sum: one small file for each kind."""

from __future__ import annotations

from fedsim.privacy.noise.base import (
    Noise,
    NoiseDraws,
    NoiseState,
    check_split,
    part_multiplier,
)
from fedsim.privacy.noise.correlated import Correlated, Toeplitz
from fedsim.privacy.noise.independent import Independent

__all__ = [
    "Correlated",
    "Independent",
    "Noise",
    "NoiseDraws",
    "NoiseState",
    "Toeplitz",
    "check_split",
    "part_multiplier",
]

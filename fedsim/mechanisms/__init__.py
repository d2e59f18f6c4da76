"""Mechanisms: bound rows, sum them exactly, add noise once.

Rows are clients' updates or examples' gradients; mechanisms do not care which::

    mechanism = Clipping(clip_norm=1.0)
    state = mechanism.init(layout)
    total = mechanism.accumulate(state, layout)
    for block in blocks:
        total.add(DenseRows(block))
    released = mechanism.release(state, total, noise_multiplier=1.1, denominator=100.0, noise=noise)
    vector += released.mean
"""

from __future__ import annotations

from fedsim.mechanisms.adaclip import AdaClip
from fedsim.mechanisms.averaging import NoPrivacy
from fedsim.mechanisms.base import Accumulator, Mechanism, Release, Shares, State
from fedsim.mechanisms.blocks import Releases, releases
from fedsim.mechanisms.coordinates import AdaptiveNoise, CoordinateClipping
from fedsim.mechanisms.noise import NoiseSource
from fedsim.mechanisms.per_layer import PerLayer
from fedsim.mechanisms.quantile import QuantileClipping
from fedsim.mechanisms.scalar import PrivateScalar
from fedsim.mechanisms.scaling import Clipping, Normalization, NormBound, ScalingMechanism

__all__ = [
    "Accumulator",
    "AdaClip",
    "AdaptiveNoise",
    "Clipping",
    "CoordinateClipping",
    "Mechanism",
    "NoPrivacy",
    "NoiseSource",
    "NormBound",
    "Normalization",
    "PerLayer",
    "PrivateScalar",
    "QuantileClipping",
    "Release",
    "Releases",
    "ScalingMechanism",
    "Shares",
    "State",
    "releases",
]

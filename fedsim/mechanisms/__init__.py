"""Mechanisms: bound rows, sum them exactly, add noise once.

Rows are clients' updates or examples' gradients; mechanisms do not care which::

    mechanism = Clipping(clip_norm=1.0)
    releaser = Releaser(mechanism, layout, noise=Independent(1.1), denominator=100.0)
    total = releaser.start(mechanism.init(layout))
    for block in blocks:
        total.add(DenseRows(block))
    released = releaser.release(total, NoiseSource(generator))
    vector += released.mean
"""

from __future__ import annotations

from fedsim.mechanisms.adaclip import AdaClip
from fedsim.mechanisms.averaging import NoPrivacy
from fedsim.mechanisms.base import Bound, Mechanism, Part, Side, State
from fedsim.mechanisms.coordinates import AdaptiveNoise, CoordinateClipping
from fedsim.mechanisms.drawing import NoiseSource
from fedsim.mechanisms.partial import PartialSum, Shares
from fedsim.mechanisms.per_layer import PerLayer
from fedsim.mechanisms.quantile import QuantileClipping
from fedsim.mechanisms.releaser import Release, Releaser, share
from fedsim.mechanisms.scalar import PrivateScalar
from fedsim.mechanisms.scaling import Clipping, Normalization, NormBound, ScalingBound
from fedsim.privacy.noise import Independent

__all__ = [
    "AdaClip",
    "AdaptiveNoise",
    "Bound",
    "Clipping",
    "CoordinateClipping",
    "Independent",
    "Mechanism",
    "NoPrivacy",
    "NoiseSource",
    "NormBound",
    "Normalization",
    "Part",
    "PartialSum",
    "PerLayer",
    "PrivateScalar",
    "QuantileClipping",
    "Release",
    "Releaser",
    "ScalingBound",
    "Shares",
    "Side",
    "State",
    "share",
]

"""Mechanisms: bound rows, sum them exactly, and add noise once.

Rows are clients' updates or examples' gradients; a mechanism is the same for both::

    plan = ReleasePlan(
        level="client",
        sampler=PoissonCohort(rate=0.1, population=1000),
        mechanism=Clipping(clip_norm=1.0),
        noise=Independent(1.1),
    )
    releaser = Releaser(plan, layout)
    total = releaser.start(plan.mechanism.init(layout))
    for block in blocks:
        total.add(DenseRows(block))
    released = releaser.release(total, NoiseSource(generator))
    vector += released.mean
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.lazy import lazy_names

if TYPE_CHECKING:
    from fedsim.mechanisms.adaclip import AdaClip
    from fedsim.mechanisms.adaptive_noise import AdaptiveNoise
    from fedsim.mechanisms.base import Mechanism, SimpleMechanism, State
    from fedsim.mechanisms.clipping import Clipping, NormBound
    from fedsim.mechanisms.compositions import PerLayer, PrivateScalar
    from fedsim.mechanisms.coordinate_clipping import CoordinateClipping
    from fedsim.mechanisms.none import NoPrivacy
    from fedsim.mechanisms.normalization import Normalization
    from fedsim.mechanisms.partial import PartialSum
    from fedsim.mechanisms.quantile_clipping import QuantileClipping
    from fedsim.mechanisms.releaser import NoiseSource, Release, Releaser
    from fedsim.mechanisms.scaling import ScalingMechanism

__all__ = [
    "AdaClip",
    "AdaptiveNoise",
    "Clipping",
    "CoordinateClipping",
    "Mechanism",
    "NoPrivacy",
    "NoiseSource",
    "NormBound",
    "Normalization",
    "PartialSum",
    "PerLayer",
    "PrivateScalar",
    "QuantileClipping",
    "Release",
    "Releaser",
    "ScalingMechanism",
    "SimpleMechanism",
    "State",
]

__getattr__ = lazy_names(__name__, __file__)

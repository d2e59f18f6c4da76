"""What an audit of this size could have noticed."""

from __future__ import annotations

import numpy as np

from fedsim.audit.claim import Claim
from fedsim.audit.two_world import distinguish
from fedsim.randomness import Purpose, Randomness

__all__ = ["noticeable"]

FACTORS = (1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
TRIALS = 3


def noticeable(claim: Claim, runs: int, risk: float, seed: int) -> float | None:
    """Smallest of `FACTORS` by which noise could be too small and be noticed every time.

    An ideal canary on the claimed Gaussians, with that much less noise, is audited a few
    times; None if even the largest factor escapes.
    """
    draws = Randomness(seed).generator(Purpose.AUDIT, level="run", part=9)
    return next(
        (
            factor
            for factor in FACTORS
            if all(_caught(claim, factor, runs, risk, draws) for _ in range(TRIALS))
        ),
        None,
    )


def _caught(
    claim: Claim, factor: float, runs: int, risk: float, draws: np.random.Generator
) -> bool:
    events = [event for event in claim.events for _ in range(event.count)]
    std = np.array([event.total_noise_multiplier for event in events]) / factor
    shift = np.array([2.0 if event.relation == "replace-one" else 1.0 for event in events])
    without = std * draws.standard_normal((runs, len(events)))
    takes_part = draws.random((runs, len(events))) < [event.rate for event in events]
    present = shift * takes_part + std * draws.standard_normal((runs, len(events)))
    result = distinguish("", without[:, :, None], present[:, :, None], np.ones(1), claim, risk)
    return result.p_value <= risk

"""The best attack there is, on exactly what the ledger says: is its epsilon large enough?

Neighbouring federations under the ledger's own events have known distributions, and their
likelihood ratio can be drawn. What it achieves must be allowed by the claimed curve: nothing of
the strategy is in this, only the accounting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc

from fedsim.audit.checks import Check, smallest
from fedsim.audit.claim import Claim
from fedsim.audit.confidence import box_p_value
from fedsim.privacy import Event
from fedsim.randomness import Purpose, Randomness

__all__ = ["accounting_check", "log_likelihood_ratios"]

Floats = npt.NDArray[np.float64]

RUNS = 20_000
LEVELS = np.array([0.001, 0.01, 0.05, 0.2, 0.5])


def accounting_check(claim: Claim, seed: int) -> Check:
    """Whether the claimed curve, and epsilon at delta, lie below what the events leak."""
    draws = Randomness(seed).generator(Purpose.AUDIT, level="run", part=8)
    absent, present = log_likelihood_ratios(claim.events, RUNS, draws)
    half = RUNS // 2
    thresholds = np.quantile(absent[:half], 1 - LEVELS)
    alarms = np.array([(absent[half:] > level).sum() for level in thresholds])
    missed = np.array([(present[half:] <= level).sum() for level in thresholds])
    p_curve = smallest(box_p_value(alarms, missed, half, claim))
    # delta(epsilon) is the mean of a number in [0, 1] under the other world: flip its coin.
    excess = -np.expm1(np.minimum(claim.epsilon - present, 0.0))
    hits = int((draws.random(RUNS) < excess).sum())
    p_delta = float(bdtrc(hits - 1, RUNS, claim.delta)) if hits else 1.0
    return Check(
        "ledger", "epsilon of the events", f"{RUNS:,} draws of the best attack on each side",
        f"delta {hits / RUNS:.2g} at epsilon {claim.epsilon:.4g}; errors "
        f"{alarms[2] / half:.3f}, {missed[2] / half:.3f}",
        f"delta {claim.delta:g}; errors {alarms[2] / half:.3f}, "
        f"{float(claim.curve(alarms[2] / half)):.3f} or more",
        smallest([p_curve, p_delta]),
    )  # fmt: skip


def log_likelihood_ratios(
    events: Sequence[Event], runs: int, draws: np.random.Generator
) -> tuple[Floats, Floats]:
    """Of runs without and with one row at the bound, ``[runs]`` each.

    Where neighbours replace a row, the first send it at the bound's other end.
    """
    counts: dict[Event, int] = {}
    for event in events:
        counts[event] = counts.get(event, 0) + event.count
    absent, present = np.zeros(runs), np.zeros(runs)
    for event, count in counts.items():
        z, q = event.total_noise_multiplier, event.rate
        opposite = -1.0 if event.relation == "replace-one" else 0.0
        if q == 1:
            # Equal Gaussians add up to one.
            z, count = z / np.sqrt(count), 1
        for _ in range(count):
            for ratios, shift in ((absent, opposite), (present, 1.0)):
                sampled = draws.random(runs) < q
                y = shift * sampled + z * draws.standard_normal(runs)
                ratios += _mixture(y, 1.0, q, z) - _mixture(y, opposite, q, z)
    return absent, present


def _mixture(y: Floats, shift: float, q: float, z: float) -> Floats:
    """Log density of ``(1 - q) N(0, z^2) + q N(shift, z^2)`` over that of ``N(0, z^2)``."""
    if shift == 0:
        return np.zeros_like(y)
    log_absent = np.log1p(-q) if q < 1 else -np.inf
    return np.asarray(np.logaddexp(log_absent, np.log(q) + (shift * y - shift**2 / 2) / z**2))

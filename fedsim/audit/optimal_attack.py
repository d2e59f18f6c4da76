"""The optimal attack on exactly what the ledger says: is its epsilon large enough?

Neighbouring federations under the ledger's own events have known distributions, and their
likelihood ratio can be drawn. What it achieves must be allowed by the claimed curve: nothing of
the strategy is in this, only the accounting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc

from fedsim.audit.checks import Check, Statistic, statistical
from fedsim.audit.claim import Claim
from fedsim.audit.confidence import box_p_value
from fedsim.privacy import Event
from fedsim.randomness import Purpose, Randomness

__all__ = ["accounting_check", "box_p", "log_likelihood_ratios"]

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
    p_values = box_p_value(alarms, missed, half, claim)
    # delta(epsilon) is the mean of a number in [0, 1] under the other world: flip its coin.
    excess = -np.expm1(np.minimum(claim.epsilon - present, 0.0))
    hits = int((draws.random(RUNS) < excess).sum())
    level = int(p_values.argmin())
    errors = Statistic(
        f"{{}} of {half:,} missed with {alarms[level]:,} false positives",
        missed.astype(np.float64), p_values,
        lambda i, count: box_p(int(alarms[i]), round(count), half, claim), float(half), whole=True,
    )  # fmt: skip
    delta = Statistic(
        f"{{}} of {RUNS:,} beyond epsilon {claim.epsilon:.4g}", np.array([float(hits)]),
        np.array([_hits_p(hits, claim.delta)]),
        lambda _, count: _hits_p(round(count), claim.delta), float(round(RUNS * claim.delta)),
        whole=True,
    )  # fmt: skip
    return statistical(
        "ledger", "epsilon of the events", f"{RUNS:,} draws of the optimal attack on each side",
        [errors, delta],
    )  # fmt: skip


def box_p(alarms: int, missed: int, trials: int, claim: Claim) -> float:
    """`box_p_value` of two counts; 1 where all are missed."""
    if missed >= trials:
        return 1.0
    return float(box_p_value(np.array([alarms]), np.array([max(missed, 0)]), trials, claim)[0])


def _hits_p(hits: int, delta: float) -> float:
    return float(bdtrc(min(hits, RUNS) - 1, RUNS, delta)) if hits > 0 else 1.0


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

"""From counts to statements that hold with a given confidence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

from fedsim.audit.claim import Claim

__all__ = [
    "Box",
    "box_p_value",
    "epsilon_bound",
    "fewest_misses",
    "upper_rate",
]

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

LEAST_P = 1e-12
HALVINGS = 30


def upper_rate(count: npt.ArrayLike, trials: int, risk: npt.ArrayLike) -> Floats:
    """Clopper and Pearson's upper bound on a rate, wrong with probability ``risk`` at most."""
    k = np.asarray(count, dtype=np.float64)
    inside = np.minimum(k, trials - 1)
    bound = betaincinv(inside + 1, trials - inside, 1 - np.asarray(risk, dtype=np.float64))
    return np.asarray(np.where(k >= trials, 1.0, bound))


@dataclass(frozen=True)
class Box:
    """Error rates of a test, both bounded from above; together wrong with ``risk`` at most.

    Attributes
    ----------
    false_positives, false_negatives : int
        Counted, in ``trials`` runs without and ``trials`` runs with the canary.
    trials : int
    risk : float
    """

    false_positives: int
    false_negatives: int
    trials: int
    risk: float

    @property
    def rates(self) -> tuple[float, float]:
        """As counted."""
        return self.false_positives / self.trials, self.false_negatives / self.trials

    @property
    def bounds(self) -> tuple[float, float]:
        """Upper bounds on both rates."""
        high = upper_rate([self.false_positives, self.false_negatives], self.trials, self.risk / 2)
        return float(high[0]), float(high[1])


def box_p_value(
    false_positives: Counts, false_negatives: Counts, trials: int, claim: Claim
) -> Floats:
    """Smallest risk at which the box lies below the claim's curve, ``[thresholds]``.

    If the claim is true, a box of risk p lies below its curve with probability p at most.
    """
    low = np.full(len(false_positives), math.log(LEAST_P))
    high = np.zeros(len(false_positives))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        risk = np.exp(middle) / 2
        allowed = claim.curve(upper_rate(false_positives, trials, risk))
        refuted = upper_rate(false_negatives, trials, risk) < allowed
        low, high = np.where(refuted, low, middle), np.where(refuted, middle, high)
    return np.asarray(np.exp(high))


def epsilon_bound(
    false_positives: npt.ArrayLike,
    false_negatives: npt.ArrayLike,
    trials: int,
    risk: float,
    delta: float,
) -> Floats:
    """Lower bound on epsilon at ``delta``, wrong with probability ``risk`` at most."""
    fp = upper_rate(false_positives, trials, risk / 2)
    fn = upper_rate(false_negatives, trials, risk / 2)
    with np.errstate(divide="ignore"):
        ratio = np.maximum((1 - delta - fn) / fp, (1 - delta - fp) / fn)
        return np.asarray(np.log(np.maximum(ratio, 1.0)))


def fewest_misses(false_positives: int, trials: int, claim: Claim, risk: float) -> int:
    """So many false negatives, with these false positives, do not refute a claim at ``risk``."""
    alarms = np.array([false_positives])
    low, high = 0, trials
    while low < high:
        middle = (low + high) // 2
        refuted = box_p_value(alarms, np.array([middle]), trials, claim)[0] <= risk
        low, high = (middle + 1, high) if refuted else (low, middle)
    return low

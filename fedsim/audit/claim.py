"""What is claimed, a trade-off curve, and how surely counted errors of an attack refute it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

from fedsim.audit.checks import Floats
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Adjacency, Event, Ledger
from fedsim.privacy.tradeoff import TradeOff, tradeoff

LEAST_P = 1e-12
HALVINGS = 30


@dataclass(frozen=True)
class Claim:
    """What a ledger says about the releases of one run.

    If the claim is true, any attack that distinguishes two neighbouring federations at a false
    positive rate ``a`` has a false negative rate of at least ``curve(a)``.

    Parameters
    ----------
    events : tuple of Event
        The releases.
    delta : float
        Where epsilon is reported.
    """

    events: tuple[Event, ...]
    delta: float = 1e-5
    _accountant: Accountant = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_accountant", Accountant(self.events))

    @classmethod
    def of(cls, ledger: Ledger, delta: float) -> Claim:
        """What this ledger has charged."""
        return cls(tuple(entry.event for entry in ledger.charged), delta)

    @classmethod
    def gaussian(cls, mu: float, delta: float = 1e-5) -> Claim:
        """One Gaussian whose sensitivity is ``mu`` standard deviations."""
        return cls((Event(noise_multiplier=1 / mu),), delta)

    @cached_property
    def epsilon(self) -> float:
        """At `delta`; infinite where nothing is claimed."""
        return self._accountant.epsilon(self.delta)

    @property
    def adjacency(self) -> Adjacency:
        """Which neighbours the claim is about."""
        return self._accountant.adjacency

    @property
    def releases(self) -> int:
        """Number of releases."""
        return self._accountant.releases

    @cached_property
    def tradeoff(self) -> TradeOff:
        """The whole claim.

        Raises
        ------
        FedsimError
            If nothing is claimed.
        """
        if not math.isfinite(self.epsilon):
            raise FedsimError(
                "epsilon is infinite by the ledger itself: there is no claim to audit."
            )
        return tradeoff(self._accountant)

    def curve(self, false_positives: npt.ArrayLike) -> Floats:
        """Least false negative rate that the claim allows, same shape as the argument."""
        return self.tradeoff(false_positives)


def common_claim(claims: Iterable[Claim]) -> Claim:
    """The one claim that all runs make.

    Raises
    ------
    FedsimError
        If they differ: then what one run claims would depend on the data.
    """
    distinct = set(claims)
    if len(distinct) != 1:
        raise FedsimError("the ledgers of equal runs claim different things.")
    return distinct.pop()


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
    false_positives: npt.ArrayLike, false_negatives: npt.ArrayLike, trials: int, claim: Claim
) -> Floats:
    """Smallest risk at which the box of these counts lies below the claim's curve, elementwise.

    If the claim is true, a box of risk p lies below its curve with probability p at most.
    """
    false_negatives = np.maximum(false_negatives, 0)
    shape = np.broadcast_shapes(np.shape(false_positives), np.shape(false_negatives))
    low, high = np.full(shape, math.log(LEAST_P)), np.zeros(shape)
    # Bisection on the logarithm of the risk, for all thresholds at once: a smaller risk widens the
    # box, so that there is one risk at which its corner is on the curve.
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        risk = np.exp(middle) / 2  # each of the two rates has half of it
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
    low, high = 0, trials
    while low < high:
        middle = (low + high) // 2
        refuted = float(box_p_value(false_positives, middle, trials, claim)) <= risk
        low, high = (middle + 1, high) if refuted else (low, middle)
    return low

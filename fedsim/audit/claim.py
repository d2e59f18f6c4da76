"""The claim, a trade-off curve, and tests of an attack's error counts against it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

from fedsim.array_types import Floats, Ints
from fedsim.audit.findings import Statistic
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Adjacency, Entry, Event
from fedsim.privacy.tradeoff import TradeOff, tradeoff

MIN_P = 1e-12
HALVINGS = 30


@dataclass(frozen=True)
class Claim:
    """What a ledger, or its author, claims about the releases of one run.

    If the claim is true, any attack that distinguishes two neighbouring federations at a false
    positive rate ``a`` has a false negative rate of at least ``curve(a)``.

    Parameters
    ----------
    events : tuple of Event
        Events of the releases.
    delta : float
        Delta at which epsilon is reported.
    declared_epsilon : float, optional
        Epsilon of all releases, claimed without events: the noise is not known.
    """

    events: tuple[Event, ...]
    delta: float = 1e-5
    declared_epsilon: float | None = None
    _accountant: Accountant = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_accountant", Accountant(self.events))

    @classmethod
    def from_entries(cls, entries: Iterable[Entry], delta: float) -> Claim:
        """The claim of these lines of a ledger."""
        return cls(tuple(entry.event for entry in entries), delta)

    @classmethod
    def gaussian(cls, mu: float, delta: float = 1e-5) -> Claim:
        """The claim of one Gaussian release whose sensitivity is ``mu`` standard deviations."""
        return cls((Event(noise_multiplier=1 / mu),), delta)

    @cached_property
    def epsilon(self) -> float:
        """Epsilon at `delta`; infinite if nothing is claimed."""
        if self.declared_epsilon is not None:
            return self.declared_epsilon
        return self._accountant.epsilon(self.delta)

    @property
    def adjacency(self) -> Adjacency:
        """Adjacency of the claim."""
        return self._accountant.adjacency

    @property
    def releases(self) -> int:
        """Number of releases."""
        return self._accountant.releases

    @cached_property
    def tradeoff(self) -> TradeOff:
        """The claim's trade-off function.

        Raises
        ------
        FedsimError
            If nothing is claimed.
        """
        if not math.isfinite(self.epsilon):
            raise FedsimError(
                "epsilon is infinite by the ledger itself: there is no claim to audit."
            )
        if self.declared_epsilon is not None:
            # The one pair that is known: the curve of any such mechanism.
            return TradeOff(np.array([self.epsilon]), np.array([self.delta]))
        return tradeoff(self._accountant)

    def curve(self, false_positives: npt.ArrayLike) -> Floats:
        """Least false negative rate that the claim allows, of the argument's shape."""
        return self.tradeoff(false_positives)


def upper_rate(count: npt.ArrayLike, trials: int, risk: npt.ArrayLike) -> Floats:
    """Clopper and Pearson's upper bound on a rate, at confidence ``1 - risk``."""
    k = np.asarray(count, dtype=np.float64)
    inside = np.minimum(k, trials - 1)
    bound = betaincinv(inside + 1, trials - inside, 1 - np.asarray(risk, dtype=np.float64))
    return np.asarray(np.where(k >= trials, 1.0, bound))


@dataclass(frozen=True)
class Box:
    """Both error rates of a test, with upper bounds that hold together at confidence ``1 - risk``.

    Attributes
    ----------
    false_positives, false_negatives : int
        Errors in ``trials`` runs without and ``trials`` runs with the canary.
    trials : int
    risk : float
    """

    false_positives: int
    false_negatives: int
    trials: int
    risk: float

    @property
    def rates(self) -> tuple[float, float]:
        """Measured rates of false positives and false negatives."""
        return self.false_positives / self.trials, self.false_negatives / self.trials

    @property
    def bounds(self) -> tuple[float, float]:
        """Upper bounds on both rates."""
        high = upper_rate([self.false_positives, self.false_negatives], self.trials, self.risk / 2)
        return float(high[0]), float(high[1])


def box_p_value(
    false_positives: npt.ArrayLike, false_negatives: npt.ArrayLike, trials: int, claim: Claim
) -> Floats:
    """p-values of error counts: smallest risks at which their boxes lie below the claim's curve.

    If the claim is true, a box of risk p lies below the curve with probability at most p.
    """
    false_negatives = np.maximum(false_negatives, 0)
    shape = np.broadcast_shapes(np.shape(false_positives), np.shape(false_negatives))
    low, high = np.full(shape, math.log(MIN_P)), np.zeros(shape)
    # Bisection on the logarithm of the risk, for all counts at once: a smaller risk widens the box,
    # so that there is exactly one risk at which its corner is on the curve.
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        risk = np.exp(middle) / 2  # each of the two rates gets half of it
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
    """Lower bound on epsilon at ``delta``, at confidence ``1 - risk``."""
    fp = upper_rate(false_positives, trials, risk / 2)
    fn = upper_rate(false_negatives, trials, risk / 2)
    with np.errstate(divide="ignore"):
        ratio = np.maximum((1 - delta - fn) / fp, (1 - delta - fp) / fn)
        return np.asarray(np.log(np.maximum(ratio, 1.0)))


def missed_statistic(
    alarms: Ints, missed: Ints, trials: int, claim: Claim, score: str = ""
) -> Statistic:
    """Statistic of attacks' false negatives against the claim's curve; words of the worst one.

    Parameters
    ----------
    alarms, missed : int64 ``[n]``
        Errors of each attack, in ``trials`` runs without and ``trials`` runs with the canary.
    score : str
        Description of the attack, for the statistic's words.
    """

    def p(counts: Floats, index: Any) -> Floats:
        return box_p_value(alarms[index], counts.astype(np.int64), trials, claim)

    every = Statistic("", missed.astype(np.float64), p, float(trials), whole=True)
    shown = f"{alarms[int(every.p_values.argmin())]:,} false positives"
    return replace(every, words=f"{{}} of {trials:,} missed with {shown}{score}")

"""What is claimed: (epsilon, delta) for every epsilon, which is a trade-off curve."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Adjacency, Event, Ledger

__all__ = ["Claim"]

Floats = npt.NDArray[np.float64]

# Where the curve is sampled. Lines through the samples lie nowhere above the true curve, so a
# coarse grid only makes the audit more lenient.
DELTAS = np.concatenate([np.geomspace(1e-7, 0.02, 32), np.linspace(0.03, 0.99, 49)])


@dataclass(frozen=True)
class Claim:
    """What a ledger says about the releases of one run.

    Whoever tells two neighbouring federations apart, with false positives ``a``, has false
    negatives of at least ``curve(a)`` if the claim holds: for every epsilon,
    ``a' >= 1 - delta - e^eps a`` and ``a' >= e^-eps (1 - delta - a)`` (Kairouz, Oh and
    Viswanath 2015; Dong, Roth and Su 2022).

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
        """What this ledger has recorded."""
        return cls(tuple(entry.event for entry in ledger.entries), delta)

    @classmethod
    def gaussian(cls, mu: float, delta: float = 1e-5) -> Claim:
        """One Gaussian whose sensitivity is ``mu`` standard deviations."""
        return cls((Event(noise_multiplier=1 / mu, sampler="full"),), delta)

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
    def pairs(self) -> tuple[Floats, Floats]:
        """Epsilons and their deltas, both ``[points]``; together they are the whole claim.

        Raises
        ------
        FedsimError
            If nothing is claimed.
        """
        if not math.isfinite(self.epsilon):
            raise FedsimError(
                "epsilon is infinite by the ledger itself: there is no claim to audit."
            )
        epsilons = [self._accountant.epsilon(float(delta)) for delta in DELTAS]
        # Beyond the first delta that costs nothing, the others say nothing new.
        last = 1 + next((k for k, epsilon in enumerate(epsilons) if epsilon == 0), len(epsilons))
        return np.array(epsilons[:last]), DELTAS[:last]

    def curve(self, false_positives: npt.ArrayLike) -> Floats:
        """Least false negative rate that the claim allows, same shape as the argument."""
        a = np.asarray(false_positives, dtype=np.float64)[..., None]
        epsilons, deltas = self.pairs
        grown = np.exp(np.minimum(epsilons, 700.0))
        lines = np.maximum(1 - deltas - grown * a, (1 - deltas - a) / grown)
        return np.asarray(np.maximum(lines, 0.0).max(-1))


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

"""What is claimed: a trade-off curve, of which (epsilon, delta) is one point."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Adjacency, Event, Ledger
from fedsim.privacy.tradeoff import TradeOff, tradeoff

__all__ = ["Claim", "common_claim"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Claim:
    """What a ledger says about the releases of one run.

    Whoever tells two neighbouring federations apart, with false positives ``a``, has false
    negatives of at least ``curve(a)`` if the claim holds.

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

"""Noise as a value: how large, who adds it, whether rounds share it, and what a run of it costs.

A noise says nothing of how normal numbers are drawn; it combines fresh draws with what it
keeps of earlier ones. Both are in units of the standard deviation, coordinate by coordinate,
in float64, before any rounding to a grid: rounding errors must never enter a recursion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fedsim.errors import FedsimError
from fedsim.privacy.events import Event

__all__ = [
    "Independent",
    "Noise",
    "NoiseState",
    "Sampled",
    "check_split",
    "part_multiplier",
    "share_multiplier",
    "top_up_multiplier",
]

NoiseState = Mapping[str, Any]
"""Named arrays, each shaped like the draws. Secret: who knows it can take noise away again."""


class Sampled(Protocol):
    """Whatever knows the event of its draw: a sampler of clients or of examples."""

    def event(
        self,
        noise_multiplier: float,
        *,
        count: int = 1,
        sides: Mapping[str, float] | None = None,
        guarantee: bool = True,
    ) -> Event:
        """Of releases over what was drawn."""


class Noise(Protocol):
    """What is added to a sum."""

    @property
    def multiplier(self) -> float:
        """Standard deviation of fresh draws on the sum over C, all parts of it taken together."""

    @property
    def hardened(self) -> bool:
        """Whether draws withstand attacks on floating-point sampling."""

    @property
    def correlated(self) -> bool:
        """Whether rounds share draws.

        The guarantee is then of the whole run in units of one C: bounds whose C or coordinates
        change are refused, and so are shares, each drawn by a client that may drop out.
        """

    def scaled(self, multiplier: float) -> Noise:
        """The same noise at another multiplier."""

    def start(self) -> NoiseState:
        """What is kept before the first round."""

    def combine(self, fresh: Any, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's noise and what is kept, from standard normal draws ``[..., size]``.

        Neither ``fresh`` nor what ``state`` holds may be overwritten where it is kept.
        """

    def event(
        self, sampler: Sampled, *, rounds: int = 1, releases: int = 1, guarantee: bool = True
    ) -> Event:
        """What this many rounds cost, each of so many releases, over what ``sampler`` draws."""


@dataclass(frozen=True)
class Independent:
    """Fresh noise in every release, as in DP-SGD and DP-FedAvg.

    Guarantee: each release is one Gaussian mechanism of this multiplier on a sum of
    sensitivity C; releases compose.

    Parameters
    ----------
    multiplier : float
        z, at least 0; 0 is no noise.
    hardened : bool
        Four draws a value (Holohan and Braghin 2021), at four times the cost.
    """

    multiplier: float
    hardened: bool = True

    def __post_init__(self) -> None:
        if not self.multiplier >= 0:
            raise FedsimError(f"noise-multiplier is {self.multiplier}; it must be at least 0.")

    @property
    def correlated(self) -> bool:
        """False."""
        return False

    def scaled(self, multiplier: float) -> Independent:
        """See `Noise`."""
        return replace(self, multiplier=multiplier)

    def start(self) -> NoiseState:
        """Nothing."""
        return {}

    def combine(self, fresh: Any, state: NoiseState) -> tuple[Any, NoiseState]:
        """The draws as they are."""
        return fresh, state

    def event(
        self, sampler: Sampled, *, rounds: int = 1, releases: int = 1, guarantee: bool = True
    ) -> Event:
        """See `Noise`: ``rounds * releases`` Gaussians of this multiplier."""
        # A round's samples are drawn together: shuffled passes begin anew in each.
        return sampler.event(self.multiplier, count=releases, guarantee=guarantee).times(rounds)


def part_multiplier(noise_multiplier: float, shares: tuple[float, ...]) -> float:
    """Noise multiplier of what has these shares of ``1/z^2``, infinite for a share of 0."""
    for share in shares:
        noise_multiplier = noise_multiplier / math.sqrt(share) if share > 0 else math.inf
    return noise_multiplier


def check_split(
    noise_multiplier: float, split: Mapping[str, float], vectors: Iterable[str], of: object
) -> None:
    """Raise unless what a release consists of is, taken together, as noisy as is charged for.

    Parameters
    ----------
    noise_multiplier : float
        What is charged.
    split : mapping of name to float
        Noise multipliers; infinite for what is not released.
    vectors : iterable of str
        Those of them that always are.
    of : object
        Whose split it is.

    Raises
    ------
    FedsimError
        If ``sum_j 1/z_j^2`` exceeds ``1/z^2``, or a vector is not released.
    """
    for name in vectors:
        if not split.get(name, math.inf) < math.inf:
            raise FedsimError(f"split of {of} gives no noise multiplier to '{name}'; it must.")
    if noise_multiplier == 0:
        return
    squares = sum(z**-2 if z > 0 else math.inf for z in split.values())
    if not squares <= noise_multiplier**-2 * (1 + 1e-9):
        raise FedsimError(
            f"split of {of} makes {dict(split)} of a noise multiplier of {noise_multiplier:g}; "
            f"they protect no better than one of {squares**-0.5:g} (the sum of their 1/z^2 may "
            "not exceed its)."
        )


def share_multiplier(noise_multiplier: float, asked: int) -> float:
    """Noise multiplier of one client's share among ``asked`` clients: ``z / sqrt(asked)``."""
    if asked < 1:
        raise FedsimError(f"asked is {asked}; a share needs at least one client asked.")
    return noise_multiplier / math.sqrt(asked)


def top_up_multiplier(noise_multiplier: float, asked: int, usable: int) -> float:
    """Noise multiplier of what the server adds when ``usable`` of ``asked`` shares arrived.

    ``z * sqrt(1 - usable / asked)``, all of z when nobody was asked: the variance of the sum is
    z^2 C^2 whatever the cohort's size and however many dropped out.
    """
    if not 0 <= usable <= asked:
        raise FedsimError(f"usable is {usable}; it must lie between 0 and asked, {asked}.")
    if asked == 0:
        return noise_multiplier
    return noise_multiplier * math.sqrt(1 - usable / asked)

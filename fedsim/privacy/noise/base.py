"""Interface of a noise: its size, its correlation over rounds or clients, and its privacy cost.

A noise draws no random numbers itself. It is given standard normal draws and combines them with
its state, coordinate by coordinate. Both are float64, in units of the standard deviation, and
not yet rounded to a grid: a rounding error in the state of a recursion would be in the noise of
all later rounds, and the proofs are for exact Gaussians.

A new noise is one file in this package. A user's noise lives outside fedsim, and its cost is
always *declared by the user*.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Law, Participation
from fedsim.settings import check_settings

NoiseState = Mapping[str, Any]
"""Named arrays, each shaped like the draws. Secret: with them, noise can be subtracted."""


@dataclass(frozen=True)
class NoiseDraws:
    """Standard normal draws of a round and of earlier rounds, ``[..., size]``.

    Attributes
    ----------
    round : int
        Number of this round, from 1 on.
    draws_of : callable ``(age, number) -> draws``
        Gives the draws of the round that was ``age`` rounds ago; ``number`` distinguishes several
        draws of one round. This round's are drawn at the call, earlier ones are regenerated.
    """

    round: int
    draws_of: Callable[[int, int], Any]

    def __call__(self, age: int = 0, number: int = 0) -> Any:
        """Draws of the round ``age`` rounds ago, in a tensor that may be changed in place."""
        return self.draws_of(age, number)


@dataclass(frozen=True)
class Noise(ABC):
    """Base of noises, which are added to a sum. Subclasses are frozen, with no hidden state.

    Raises
    ------
    FedsimError
        If the multiplier is below 0.
    """

    multiplier: float
    """z, the noise multiplier: standard deviation of a round's fresh draws on the sum, divided by
    C, for all parts of a release together."""
    hardened: bool = True
    """Whether draws withstand attacks on floating-point sampling (four draws a value, Holohan and
    Braghin 2021), at four times the cost."""

    def __post_init__(self) -> None:
        check_settings(self, "noise.")
        if not self.multiplier >= 0:
            raise FedsimError(f"noise-multiplier is {self.multiplier}; it must be at least 0.")

    @property
    def correlated(self) -> bool:
        """Whether the noise of one round depends on draws of others.

        The guarantee is then one of the whole plan in units of one C, so that mechanisms whose C or
        coordinates change over rounds are refused.
        """
        return False

    @property
    def divisible(self) -> bool:
        """Whether n independent noises at ``z / sqrt(n)`` sum to one at z, so clients may share it.

        False is always safe: the server then draws all of it.
        """
        return False

    def with_multiplier(self, multiplier: float) -> Self:
        """The same noise at another multiplier."""
        return replace(self, multiplier=multiplier)

    def start(self) -> NoiseState:
        """State before the first round."""
        return {}

    def fit(self, participation: Participation) -> Self:
        """This noise, adapted to the rounds that one row can be in."""
        return self

    @abstractmethod
    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's noise ``[..., size]``, and the state for the next round.

        The noise may be one of the new state's tensors: the caller must change neither in place,
        and an implementation must not change the tensors of the state that it is given.
        """

    def variances(self, rounds: int) -> npt.NDArray[np.float64]:
        """Variance of one coordinate of the summed noise of rounds 1 to t, at multiplier 1.

        Returns
        -------
        float64 ``[rounds]``
            For t from 1 to ``rounds``.
        """
        return np.arange(1.0, rounds + 1)

    @abstractmethod
    def law(self, law: Law) -> Law:
        """Law of releases with this noise, given the sampler's law for independent Gaussians."""


def part_multiplier(noise_multiplier: float, shares: tuple[float, ...]) -> float:
    """Noise multiplier of a part of a release, given its share of ``1/z^2``.

    Shares of shares are multiplied; a share of 0 gives infinity (not released).
    """
    for share in shares:
        noise_multiplier = noise_multiplier / math.sqrt(share) if share > 0 else math.inf
    return noise_multiplier


def check_split(
    noise_multiplier: float, split: Mapping[str, float], vectors: Iterable[str], mechanism: object
) -> None:
    """Raise unless the parts of a release together cost no more than is charged.

    Gaussians with multipliers z_j on parts of one row compose to one with
    ``1/z^2 = sum_j 1/z_j^2``.

    Parameters
    ----------
    noise_multiplier : float
        z, the multiplier that is charged.
    split : mapping of name to float
        Noise multiplier of each part; infinite for a part that is not released.
    vectors : iterable of str
        Names of the parts that must be released.
    mechanism : object
        The mechanism that splits, for the error message.

    Raises
    ------
    FedsimError
        If ``sum_j 1/z_j^2`` exceeds ``1/z^2``, or a vector is not released.
    """
    for name in vectors:
        if not split.get(name, math.inf) < math.inf:
            raise FedsimError(
                f"split of {mechanism} gives no noise multiplier to '{name}'; it must."
            )
    if noise_multiplier == 0:
        return
    squares = sum(z**-2 if z > 0 else math.inf for z in split.values())
    if not squares <= noise_multiplier**-2 * (1 + 1e-9):
        raise FedsimError(
            f"split of {mechanism} makes {dict(split)} of a noise multiplier of "
            f"{noise_multiplier:g}; they protect no better than one of {squares**-0.5:g} (the sum "
            "of their 1/z^2 may not exceed its)."
        )

"""Noise as a value: how large it is, whether rounds or clients share it, and what that costs.

A noise does not draw normal numbers itself; it combines fresh draws with what it keeps of earlier
ones. Both are in units of the standard deviation, coordinate by coordinate,
in float64, before any rounding to a grid: rounding errors must never enter a recursion.

A new noise is one file beside this one, or one of a user's elsewhere: what it costs is then
*declared by the user*, always.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Law, Participation
from fedsim.settings import Doc, check_settings

NoiseState = Mapping[str, Any]
"""Named arrays, each shaped like the draws. Secret: who knows it can take noise away again."""


@dataclass(frozen=True)
class NoiseDraws:
    """Standard normal draws of a round and of the rounds before it, ``[..., size]``.

    Attributes
    ----------
    round : int
        From 1 on.
    of : callable ``(age, number) -> draws``
        Those of the round so many before this one; several of one round are numbered. This round's
        are drawn when they are asked for, those of earlier rounds are regenerated.
    """

    round: int
    of: Callable[[int, int], Any]

    def __call__(self, age: int = 0, number: int = 0) -> Any:
        """The draws, which may be changed in place."""
        return self.of(age, number)


@dataclass(frozen=True)
class Noise(ABC):
    """What is added to a sum. Subclasses are frozen dataclasses without hidden state.

    Raises
    ------
    FedsimError
        If the multiplier is below 0.
    """

    multiplier: Annotated[
        float,
        Doc("z: standard deviation of fresh draws on the sum over C, all parts of it together."),
    ]
    hardened: Annotated[
        bool,
        Doc(
            "Whether draws withstand attacks on floating-point sampling (four draws a value, "
            "Holohan and Braghin 2021), at four times the cost."
        ),
    ] = True

    def __post_init__(self) -> None:
        check_settings(self, "noise.")
        if not self.multiplier >= 0:
            raise FedsimError(f"noise-multiplier is {self.multiplier}; it must be at least 0.")

    @property
    def correlated(self) -> bool:
        """Whether rounds share draws.

        The guarantee is then of the whole run in units of one C: bounds whose C or coordinates
        change are refused.
        """
        return False

    @property
    def divisible(self) -> bool:
        """Whether n clients' draws at ``z / sqrt(n)`` add up to one at z: they may share it then.

        False is always safe: the server then draws.
        """
        return False

    def scaled(self, multiplier: float) -> Self:
        """The same noise at another multiplier."""
        return replace(self, multiplier=multiplier)

    def start(self) -> NoiseState:
        """What is kept before the first round."""
        return {}

    def fitted(self, participation: Participation) -> Self:
        """The same noise, made for the rounds that one row can be in."""
        return self

    @abstractmethod
    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's noise ``[..., size]`` and what is kept.

        Neither is changed in place where the state keeps it. Draws are tensors.
        """

    def variances(self, rounds: int) -> npt.NDArray[np.float64]:
        """Variance of a coordinate of the first t rounds' noise together, for multiplier 1.

        Returns
        -------
        float64 ``[rounds]``
        """
        return np.arange(1.0, rounds + 1)

    @abstractmethod
    def law(self, law: Law) -> Law:
        """What a sum over rows of this law costs with this noise in the place of a Gaussian."""


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

    ``z * sqrt(1 - usable / asked)``, all of z when the cohort was empty: the variance of the sum
    is z^2 C^2 for any size of the cohort and any number of dropouts.
    """
    if not 0 <= usable <= asked:
        raise FedsimError(f"usable is {usable}; it must lie between 0 and asked, {asked}.")
    if asked == 0:
        return noise_multiplier
    return noise_multiplier * math.sqrt(1 - usable / asked)

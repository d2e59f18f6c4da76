"""Fresh noise in every release, as in DP-SGD and DP-FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsim.privacy.laws.base import Law
from fedsim.privacy.noise.base import Noise, NoiseDraws, NoiseState
from fedsim.registry import register


@register("noise", "independent")
@dataclass(frozen=True)
class Independent(Noise):
    """A Gaussian in every release, independent of all others.

    Guarantee: each release is one Gaussian mechanism of this multiplier on a sum of
    sensitivity C; releases compose.
    """

    @property
    def divisible(self) -> bool:
        """True: sums of Gaussians are Gaussians."""
        return True

    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """The draws, unchanged."""
        return draws(), state

    def law(self, law: Law) -> Law:
        """The same: laws are of Gaussians."""
        return law

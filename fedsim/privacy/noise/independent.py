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
    """Fresh Gaussian noise in every release, independent of all others.

    Guarantee: each release is one Gaussian mechanism with this multiplier, on a sum of
    sensitivity C; releases compose.
    """

    @property
    def divisible(self) -> bool:
        """True: a sum of independent Gaussians is a Gaussian."""
        return True

    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """This round's draws, unchanged; there is no state."""
        return draws(), state

    def law(self, law: Law) -> Law:
        """The sampler's law itself, which is for independent Gaussians already."""
        return law

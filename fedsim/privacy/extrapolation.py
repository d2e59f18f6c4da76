"""What a run would have cost with a larger cohort, whose noise on the mean it has added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fedsim.privacy.accountant import Accountant
from fedsim.privacy.sampling import Sampler

__all__ = ["Extrapolation"]


@dataclass(frozen=True)
class Extrapolation:
    """A figure that no release of the run has: it never stands without the run's own.

    With a cohort of expected size m, and noise of standard deviation ``z C m / M`` on its sum, the
    mean has the noise that it would have with a cohort of M and multiplier z.

    Attributes
    ----------
    epsilon, delta : float
        Of as many releases with the larger cohort.
    size : float
        M, its expected size.
    population : int
        That it would be drawn from.
    noise_multiplier : float
        z.
    """

    epsilon: float
    delta: float
    size: float
    population: int
    noise_multiplier: float

    @classmethod
    def of(cls, sampler: Sampler, noise_multiplier: float, releases: int, delta: float) -> Self:
        """Of so many releases over what ``sampler`` would draw."""
        event = sampler.event(noise_multiplier)
        cost = Accountant([event.times(releases)] if releases else []).cost(delta)
        assert sampler.population is not None
        size = float(sampler.expected_size)
        return cls(cost.epsilon, delta, size, sampler.population, noise_multiplier)

    def sentence(self) -> str:
        """In plain words."""
        return (
            f"Extrapolated epsilon: {self.epsilon:.4g} at delta = {self.delta:g}, if in each "
            f"release {self.size:g} clients out of {self.population:,} had taken part with a noise "
            f"multiplier of {self.noise_multiplier:g} (noise.cohort-size). This run has added that "
            "run's noise on the mean, which is less than its own cohort needs for it: the "
            "extrapolated figure is no guarantee of this run."
        )

"""Mechanisms with a bug each, of a kind that has been shipped. They claim what `Clipping` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsim.cohorts import Cohort, FullCohort
from fedsim.mechanisms import AdaptiveNoise, Clipping, Mechanism
from fedsim.mechanisms.base import NoiselessSum
from fedsim.server_optimizers import ServerOptimizer
from fedsim.strategies import DPFedAvg


class Adding(ServerOptimizer):
    """A server optimiser that adds the mean and has no settings."""

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        return vector + update.to(vector.dtype)


def strategies(
    mechanism: Mechanism, cohort: Cohort | None = None, z: float = 1.0, **settings: Any
) -> Callable[[int], DPFedAvg]:
    return lambda seed: DPFedAvg(
        mechanism=mechanism,
        cohort=cohort or FullCohort(10),
        noise_multiplier=z,
        seed=seed,
        server_optimizer=Adding(),
        **settings,
    )


class LessNoise(Clipping):
    """The noise is five times too small for the rows."""

    def bound_(self, y, round_state):
        shaped = super().bound_(y, round_state)
        return shaped._replace(factor=5 * shaped.factor)


class CountedTwice(Clipping):
    """A client's row enters the sum twice."""

    def bound_(self, y, round_state):
        shaped = super().bound_(y, round_state)
        return shaped._replace(factor=2 * shaped.factor)


class RealisedCount(Clipping):
    """The mean is over those who replied, not over those expected."""

    noiseless_sums = {"count": NoiselessSum(unit=1.0)}  # noqa: RUF012

    def row_scalars(self, clipped):
        return {"count": torch.ones_like(clipped, dtype=torch.float64)}

    def divisor(self, sums, denominator):
        return sums["count"].clamp_min(1)


class WeightedByExamples(RealisedCount):
    """FedAvg's weighted mean, of rows that are bounded before they are weighted."""

    @property
    def weighting(self):
        return "num-examples"

    noiseless_sums = {"count": NoiselessSum(unit=2.0**-20)}  # noqa: RUF012

    def weights(self, weights, count, device):
        return super().weights(torch.as_tensor(weights) / 1000, count, device)

    def divisor(self, sums, denominator):
        return torch.where(sums["count"] > 0, sums["count"], 1.0)


class RawStatistics(AdaptiveNoise):
    """Xu's printed form, in a ledger that takes it for private."""

    @property
    def guarantee(self):
        return "gaussian"


RAW = RawStatistics(clip_norm=1.0, threshold=0.0, beta=1.0, unsafe_non_private_raw_statistics=True)

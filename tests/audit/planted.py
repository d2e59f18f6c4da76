"""Mechanisms with a bug each, of a kind that has been shipped. They claim what `Clipping` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsim.cohorts import Cohort, FullCohort
from fedsim.mechanisms import AdaptiveNoise, Clipping, Mechanism
from fedsim.rows import DenseRows
from fedsim.strategies import DPFedAvg


class Adding:
    """A server optimiser that adds the mean and needs no torch."""

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        return vector + update.to(vector.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


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
    """The noise is five times too small."""

    def release(self, state, total, *, noise_multiplier, **rest):
        return super().release(state, total, noise_multiplier=noise_multiplier / 5, **rest)


class CountedTwice(Clipping):
    """A client's row enters the sum twice."""

    def accumulate(self, state, layout, **rest):
        total = super().accumulate(state, layout, **rest)
        add = total.add

        def twice(rows, **settings):
            usable = add(rows, **settings)
            add(DenseRows(rows.dense()[-1:]))
            return usable

        total.add = twice
        return total


class RealisedCount(Clipping):
    """The mean is over those who replied, not over those expected."""

    def release(self, state, total, *, denominator, **rest):
        return super().release(state, total, denominator=max(total.count, 1), **rest)


class WeightedByExamples(Clipping):
    """FedAvg's weighted mean, with the noise of the plain one."""

    @property
    def weighting(self):
        return "num-examples"

    def accumulate(self, state, layout, **rest):
        total = super().accumulate(state, layout, **rest)
        add = total.add
        total.weight = 0.0

        def weighted(rows, *, weights, **settings):
            shares = torch.as_tensor(weights) / 1000
            total.weight += float(shares.sum())
            return add(rows, weights=shares, **settings)

        total.add = weighted
        return total

    def release(self, state, total, *, noise_multiplier, denominator, **rest):
        weight = total.weight or 1.0
        return super().release(
            state,
            total,
            noise_multiplier=noise_multiplier * weight / denominator,
            denominator=weight,
            **rest,
        )


class RawStatistics(AdaptiveNoise):
    """Xu's printed form, in a ledger that takes it for private."""

    @property
    def guarantee(self):
        return "gaussian"


RAW = RawStatistics(clip_norm=1.0, threshold=0.0, beta=1.0, unsafe_non_private_raw_statistics=True)

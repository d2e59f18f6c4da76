"""A private mean of one number a row (its loss, its accuracy), released with the vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms.base import (
    Accumulator,
    Guarantee,
    Mechanism,
    Release,
    Shares,
    State,
    Weights,
)
from fedsim.mechanisms.exact import GridSum
from fedsim.mechanisms.noise import NoiseSource, share_multiplier, top_up_multiplier
from fedsim.mechanisms.scaling import BOUND_RANGE, check_number
from fedsim.rows.dense import Rows
from fedsim.rows.layout import Layout

__all__ = ["PrivateScalar"]


@dataclass(frozen=True)
class PrivateScalar(Mechanism):
    """Another mechanism, and beside its vector a noisy mean of one scalar.

    The scalar is clamped to ``[0, high]`` and centred, so that a row that joins moves its sum
    by ``high / 2`` at most: ``mean = high / 2 + (sum of (x - high / 2) + noise) / r``.

    Guarantee: that of the mechanism inside, at the whole multiplier z: of ``1 / z^2`` the
    scalar takes ``fraction`` and leaves the rest; its noise multiplier is ``z / sqrt(fraction)``.

    Parameters
    ----------
    mechanism : Mechanism
    name : str
        Of the scalar, in `Accumulator.add` and `Release.sides`.
    high : float
        The largest value.
    fraction : float
        In [0, 1). 0 is infinite noise: the scalar is not released.
    """

    mechanism: Mechanism
    name: str = "loss"
    high: float = 1.0
    fraction: float = 0.1

    def __post_init__(self) -> None:
        check_number("high", self.high, *BOUND_RANGE)
        if not 0 <= self.fraction < 1:
            raise FedsimError(f"fraction is {self.fraction}; it must be at least 0 and below 1.")
        if self.name in self.mechanism.side_names:
            raise FedsimError(f"name is '{self.name}'; the mechanism inside has such a scalar.")
        if self.mechanism.weighting != "uniform":
            raise FedsimError("mechanism weighs rows by their examples; a private one must not.")

    @property
    def guarantee(self) -> Guarantee:
        """The inner mechanism's."""
        return self.mechanism.guarantee

    @property
    def side_names(self) -> tuple[str, ...]:
        """The inner mechanism's, and this one."""
        return (*self.mechanism.side_names, self.name)

    def shown(self, layout: Layout) -> tuple[str, ...]:
        """The inner mechanism's, and this scalar."""
        inner = self.mechanism.shown(layout)
        return (*inner, self.name) if self.fraction else inner

    def init(self, layout: Layout) -> State:
        """The inner mechanism's state."""
        return self.mechanism.init(layout)

    def noise_multipliers(
        self, noise_multiplier: float, denominator: float, state: State | None = None
    ) -> Mapping[str, float]:
        """See `Mechanism`."""
        inner = noise_multiplier / math.sqrt(1 - self.fraction)
        split = self.mechanism.noise_multipliers(inner, denominator, state)
        return {**split, self.name: self._own(noise_multiplier)}

    def sensitivity(self, state: State, layout: Layout) -> float:
        """Of the vector."""
        return self.mechanism.sensitivity(state, layout)

    def bound(self, block: Tensor, state: State | None = None) -> Tensor:
        """The inner mechanism's."""
        return self.mechanism.bound(block, state)

    def accumulate(
        self, state: State, layout: Layout, *, device: torch.device | str = "cpu"
    ) -> Accumulator:
        """See `Mechanism`."""
        inner = self.mechanism.accumulate(state, layout, device=device)
        return _ScalarAccumulator(inner, self.name, self.high, device)

    def release(
        self,
        state: State,
        total: Accumulator,
        *,
        noise_multiplier: float,
        denominator: float,
        noise: NoiseSource,
        asked: int | None = None,
    ) -> Release:
        """See `Mechanism`."""
        if not isinstance(total, _ScalarAccumulator):
            raise TypeError(f"total is a {type(total).__name__}, not made by accumulate().")
        release = self.mechanism.release(
            state,
            total.inner,
            noise_multiplier=noise_multiplier / math.sqrt(1 - self.fraction),
            denominator=denominator,
            noise=noise,
            asked=asked,
        )
        if self.fraction == 0:
            return release
        z = self._own(noise_multiplier)
        if asked is not None:
            z = top_up_multiplier(z, asked, total.count)
        half = self.high / 2
        value = half + total.grid.noisy(z * half, noise).item() / denominator
        return replace(release, sides={**release.sides, self.name: value})

    def share(
        self,
        block: Tensor,
        state: State,
        *,
        noise_multiplier: float,
        denominator: float,
        asked: int,
        noise: Sequence[NoiseSource],
        sides: Mapping[str, Weights] | None = None,
    ) -> Shares:
        """See `Mechanism`."""
        shares = self.mechanism.share(
            block,
            state,
            noise_multiplier=noise_multiplier / math.sqrt(1 - self.fraction),
            denominator=denominator,
            asked=asked,
            noise=noise,
            sides=sides,
        )
        values = torch.zeros(len(block), dtype=torch.float64, device=block.device)
        if self.fraction > 0:
            half = self.high / 2
            z = share_multiplier(self._own(noise_multiplier), asked)
            given = _given(sides, self.name, len(block), block.device)
            for k, source in enumerate(noise):
                one = GridSum(half, 1, device=block.device)
                one.add_(_centred(given[k : k + 1], self.high, shares.usable[k : k + 1]) / one.unit)
                values[k] = one.noisy(z * half, source)[0]
        return replace(shares, sides={**shares.sides, self.name: values})

    def _own(self, noise_multiplier: float) -> float:
        if noise_multiplier == 0:
            return 0.0
        return noise_multiplier / math.sqrt(self.fraction) if self.fraction > 0 else math.inf


class _ScalarAccumulator(Accumulator):
    def __init__(
        self, inner: Accumulator, name: str, high: float, device: torch.device | str
    ) -> None:
        self.inner = inner
        self._device = torch.device(device)
        self.grid = GridSum(high / 2, 1, device=device)
        self._name = name
        self._high = high

    @property
    def count(self) -> int:
        return self.inner.count

    @property
    def rejected(self) -> int:
        return self.inner.rejected

    @property
    def clipped(self) -> int:
        return self.inner.clipped

    def add(
        self,
        rows: Rows,
        *,
        weights: Weights | None = None,
        sides: Mapping[str, Weights] | None = None,
    ) -> Tensor:
        usable = self.inner.add(rows, weights=weights, sides=sides)
        given = _given(sides, self._name, rows.count, usable.device)
        self.grid.add_(_centred(given, self._high, usable) / self.grid.unit)
        return usable

    def add_shares(self, shares: Shares) -> None:
        shares = shares.checked(self._device)
        self.inner.add_shares(shares)
        self.grid.add_(shares.sides[self._name][shares.usable][:, None] / self.grid.unit)


def _given(
    sides: Mapping[str, Weights] | None, name: str, count: int, device: torch.device
) -> Tensor:
    if sides is None or name not in sides:
        raise FedsimError(f"side scalar '{name}' is missing; the mechanism releases its mean.")
    values = torch.as_tensor(sides[name], dtype=torch.float64, device=device)
    if values.shape != (count,):
        raise FedsimError(f"side scalar '{name}' has shape {tuple(values.shape)}, not ({count},).")
    return values


def _centred(values: Tensor, high: float, usable: Tensor) -> Tensor:
    """Clamped to [0, high] and centred, ``[n, 1]``; what is NaN or unusable adds nothing."""
    centred = values.clamp(0.0, high) - high / 2
    return torch.where(usable & ~values.isnan(), centred, 0.0)[:, None]

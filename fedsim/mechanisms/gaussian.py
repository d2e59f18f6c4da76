"""What all mechanisms with one isotropic Gaussian share: everything but the bound's shape."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms.base import (
    Accumulator,
    Counts,
    Mechanism,
    Release,
    Shares,
    State,
    Weights,
    row_layout,
    row_weights,
    state_on,
)
from fedsim.mechanisms.exact import FreeSum, GridSum
from fedsim.mechanisms.noise import NoiseSource, share_multiplier, top_up_multiplier
from fedsim.rows.dense import Chunks, DenseRows, Rows, chunks
from fedsim.rows.layout import Layout

__all__ = ["GaussianMechanism", "Number", "Released", "Scalar", "Shaped", "per_row"]


LOOSE = 64.0

Number = float | Tensor
"""A number, or one for each of several sums."""


class Scalar(NamedTuple):
    """A scalar that a mechanism makes of each row: it lies within ``center +- half``."""

    center: float
    half: float


class Shaped(NamedTuple):
    """Rows that ``factor [..., c]`` brings into the ball; NaN marks a non-finite row.

    ``clipped`` says which of them were longer than their bound; ``sides`` are scalars, centred.
    """

    factor: Tensor
    clipped: Tensor
    sides: Mapping[str, Tensor]

    @classmethod
    def cat(cls, parts: Sequence[Shaped]) -> Shaped:
        """One chunk after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.factor for part in parts]),
            torch.cat([part.clipped for part in parts]),
            {k: torch.cat([part.sides[k] for part in parts]) for k in parts[0].sides},
        )


@dataclass(frozen=True)
class Released:
    """What a state is updated from: the noisy mean and scalars, and how noisy they are.

    Of several sums: ``mean [n, d]``, sides ``[n]``, and ``[n, 1]`` for what goes with the mean.
    ``raw_mean`` is not private, and None except for the mechanism that asks for it by name.
    """

    mean: Tensor
    sides: Mapping[str, Number]
    noise_multipliers: Mapping[str, Number]
    denominator: Number
    raw_mean: Tensor | None


class GaussianMechanism(Mechanism):
    """A bound in coordinates where one isotropic Gaussian does.

    A subclass gives `_radius` and `_shape`, and where it has them `_ready` (what a round needs
    beside the state), `_restore` (back to the parameters' coordinates), `_next` (new state),
    `_scalars` (scalars made of the rows) and `_info`. They see one sum, or those of n clients
    with a leading ``n`` on every tensor (``...`` below), and but for `_info` never read a value.
    """

    @abstractmethod
    def _radius(self, ready: State, d: int) -> Number:
        """L2 norm that no bounded row exceeds, in the mechanism's coordinates; ``[...]``."""

    @abstractmethod
    def _shape(self, y: Tensor, ready: State) -> Shaped:
        """Overwrite float64 rows ``y [..., c, d]`` and say by which factor they fit the ball."""

    def _ready(self, state: State) -> State:
        """The state and what is derived from it, once a round."""
        return state

    def _restore(self, w: Tensor, ready: State) -> Tensor:
        """Rows or a mean ``w [..., d]`` in the parameters' coordinates."""
        return w

    def _scalars(self) -> Mapping[str, Scalar]:
        """Scalars that `_shape` returns."""
        return {}

    def _implicit(
        self, rows: Rows, ready: State, unit: Number, weights: Tensor | None
    ) -> tuple[Shaped, Tensor] | None:
        """For rows that are not materialised: their factors and their bounded sum ``[..., d]``.

        The sum is in units of a grid, not yet on it. None where the mechanism needs dense rows.
        """
        return None

    def _next(self, ready: State, released: Released) -> State:
        """State after a release, a function of released values alone."""
        return ready

    def _info(self, ready: State, new: State, d: int) -> dict[str, float]:
        """What to show of one release."""
        return {}

    @property
    def _keeps_raw(self) -> bool:
        """Whether the un-noised sum of raw rows is kept beside; that voids the guarantee."""
        return False

    def noise_multipliers(
        self, noise_multiplier: float, denominator: float, state: State | None = None
    ) -> Mapping[str, float]:
        """See `Mechanism`: all of it on the vector."""
        return {"sum": noise_multiplier}

    def sensitivity(self, state: State, layout: Layout) -> float:
        """See `Mechanism`."""
        return float(self._radius(self._ready(state), layout.d))

    def bound(self, block: Tensor, state: State | None = None) -> Tensor:
        """See `Mechanism`; before the rounding to the sum's grid."""
        ready = self._ready_on(self.init(row_layout(block)) if state is None else state, block)
        out = torch.empty_like(block)
        for part, y in chunks(block):
            _, bad = self.units_(y, ready, 1.0, None)
            out[part] = self._restore(y, ready).masked_fill(bad[:, None], 0.0)
        return out

    def accumulate(
        self, state: State, layout: Layout, *, device: torch.device | str = "cpu"
    ) -> Accumulator:
        """See `Mechanism`."""
        return _GridAccumulator(self, state, layout, torch.device(device))

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
        if not isinstance(total, _GridAccumulator):
            raise TypeError(f"total is a {type(total).__name__}, not made by accumulate().")
        if not denominator > 0:
            raise FedsimError(f"denominator is {denominator}; it must be above 0.")
        split = self.noise_multipliers(noise_multiplier, denominator)
        drawn = split
        if asked is not None:
            drawn = {k: top_up_multiplier(z, asked, total.count) for k, z in split.items()}
        mean = total.grid.noisy(drawn["sum"] * total.grid.radius, noise).div_(denominator)
        mean = self._restore(mean, total.ready)
        sides = {
            name: scalar.center
            + total.scalars[name].noisy(drawn[name] * scalar.half, noise).item() / denominator
            for name, scalar in self._scalars().items()
        }
        raw_mean = None if total.raw is None else total.raw.value() / denominator
        state = self._next(total.ready, Released(mean, sides, split, denominator, raw_mean))
        return Release(mean, state, sides, self._info(total.ready, state, len(mean)))

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
        if self._keeps_raw:
            raise FedsimError("noise placement is 'client'; raw statistics need 'server'.")
        z = {
            name: share_multiplier(multiplier, asked)
            for name, multiplier in self.noise_multipliers(noise_multiplier, denominator).items()
        }
        scalars = self._scalars()
        layout, device = row_layout(block), block.device
        rows = torch.empty(block.shape, dtype=torch.float64, device=device)
        usable = torch.empty(len(block), dtype=torch.bool, device=device)
        values = {
            name: torch.empty(len(block), dtype=torch.float64, device=device) for name in scalars
        }
        for k, source in enumerate(noise):
            one = _GridAccumulator(self, state, layout, device)
            usable[k] = one.add(DenseRows(block[k : k + 1]))[0]
            rows[k] = one.grid.noisy(z["sum"] * one.grid.radius, source)
            for name, scalar in scalars.items():
                values[name][k] = one.scalars[name].noisy(z[name] * scalar.half, source)[0]
        return Shares(rows, values, usable)

    def _ready_on(self, state: State, block: Tensor) -> State:
        return self._ready(state_on(state, block.device))

    def units_(
        self, y: Tensor, ready: State, unit: Number, weights: Tensor | None
    ) -> tuple[Shaped, Tensor]:
        """Overwrite float64 rows ``y [..., c, d]`` by bounded, weighted rows in units of a grid.

        Returns their shape and which rows, bool ``[..., c]``, were not finite.
        """
        shaped = self._shape(y, ready)
        factor = shaped.factor / per_row(unit)
        if weights is not None:
            factor = factor * weights
        bad = factor.isnan()
        # A row of NaN times zero is NaN: non-finite rows are wiped, not multiplied by zero.
        if y.is_cuda or bool(bad.any()):
            y.masked_fill_(bad[..., None], 0.0)
            factor = factor.masked_fill(bad, 0.0)
        y.mul_(factor[..., None])
        return shaped, bad


def per_row(number: Number) -> Number:
    """A number a sum, ``[...]``, to go with ``[..., rows]``."""
    return number.unsqueeze(-1) if isinstance(number, Tensor) and number.ndim else number


class _GridAccumulator(Accumulator):
    """Exact sum of a `GaussianMechanism`'s rows and scalars."""

    def __init__(
        self, mechanism: GaussianMechanism, state: State, layout: Layout, device: torch.device
    ) -> None:
        self._mechanism = mechanism
        self.ready = mechanism._ready(state_on(state, device))
        radius = float(mechanism._radius(self.ready, layout.d))
        # A loose bound (none, nearly) makes a coarse grid: without noise that would show.
        fine = layout.dtype == torch.float64 or radius > LOOSE
        self.grid = GridSum(radius, layout.d, fine=fine, device=device)
        self.scalars = {
            name: GridSum(scalar.half, 1, device=device)
            for name, scalar in mechanism._scalars().items()
        }
        self.raw = FreeSum(layout.d, device=device) if mechanism._keeps_raw else None
        self._chunks = Chunks()
        self._device = device
        self._counts = Counts()

    @property
    def count(self) -> int:
        return self._counts.total(0)

    @property
    def rejected(self) -> int:
        return self._counts.total(1)

    @property
    def clipped(self) -> int:
        return self._counts.total(2)

    def add(
        self,
        rows: Rows,
        *,
        weights: Weights | None = None,
        sides: Mapping[str, Weights] | None = None,
    ) -> Tensor:
        if rows.count == 0:
            return torch.zeros(0, dtype=torch.bool, device=self._device)
        given = row_weights(weights, rows.count, self._device)
        implicit = None
        if not isinstance(rows, DenseRows):
            implicit = self._mechanism._implicit(rows, self.ready, self.grid.unit, given)
        if implicit is None:
            shaped, bad = self._add_dense(rows.dense(), given)
        else:
            shaped, bounded = implicit
            bad = shaped.factor.isnan()
            self.grid.add_(bounded[None], rows=rows.count)
        present = ~bad if given is None else ~bad & (given > 0)
        self._counts.add(present, bad, shaped.clipped & present)
        for name, grid in self.scalars.items():
            values = torch.where(present, shaped.sides[name], 0.0) / grid.unit
            grid.add_(values[:, None])
        return present

    def _add_dense(self, block: Tensor, weights: Tensor | None) -> tuple[Shaped, Tensor]:
        shapes, bads = [], []
        for part, y in self._chunks.of(block):
            weight = None if weights is None else weights[part]
            raw = None if self.raw is None else y * FreeSum.SCALE
            shaped, bad = self._mechanism.units_(y, self.ready, self.grid.unit, weight)
            self.grid.add_(y)
            if self.raw is not None and raw is not None:
                self.raw.add_(raw[~bad] if weight is None else (raw * weight[:, None])[~bad])
            shapes.append(shaped)
            bads.append(bad)
        return Shaped.cat(shapes), torch.cat(bads) if len(bads) > 1 else bads[0]

    def add_shares(self, shares: Shares) -> None:
        shares = shares.checked(self._device)
        usable = shares.usable
        self.grid.add_(shares.rows[usable] / self.grid.unit)
        for name, grid in self.scalars.items():
            grid.add_(shares.sides[name][usable][:, None] / grid.unit)
        self._counts.add(usable, ~usable, torch.zeros_like(usable))

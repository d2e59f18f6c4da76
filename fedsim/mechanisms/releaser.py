"""The one releaser: noisy sums of n owners, whatever their rows, bounds and noise are.

A server releases one sum, clients at example level one each, and a client's share is the noisy
sum of its one row. What a mechanism is composed of is data here: its `Segment` and `Side`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms.base import (
    NOISE_PREFIX,
    Mechanism,
    Number,
    Released,
    State,
    state_of,
    state_on,
)
from fedsim.mechanisms.drawing import NoiseSource, normals
from fedsim.mechanisms.partial import PartialSum, SegmentSum, Terms
from fedsim.privacy.noise import Noise, NoiseState, top_up_multiplier
from fedsim.rows.layout import Layout

__all__ = ["Release", "Releaser"]


@dataclass(frozen=True)
class Release:
    """What leaves a mechanism in one round.

    Attributes
    ----------
    mean : float64 ``[d]``, or ``[n, d]`` of n owners
        Noisy mean row, to be added to the parameters.
    state : State
        The mechanism's state for the next round, and what the noise keeps.
    sides : mapping of name to float, or to float64 ``[n]``
        Noisy means of the scalars.
    info : mapping of name to float
        Post-processed diagnostics (the ``clip-norm`` that was used), as public as the mean;
        none of n owners.
    """

    mean: Tensor
    state: State
    sides: Mapping[str, Number] = field(default_factory=dict)
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def shown(self) -> dict[str, float]:
        """Diagnostics and scalars of one owner."""
        return {**self.info, **{name: float(value) for name, value in self.sides.items()}}


class Releaser:
    """Bounds, sums and noises the rows of one owner, or of n independent ones.

    Guarantee: each owner's release is one Gaussian of ``noise.multiplier`` on a sum to which a
    row adds at most the mechanism's C, all segments and scalars taken together, where the
    mechanism's `guarantee` is "gaussian" and the noise independent. It has no state: rounds
    may be started, summed and released anywhere.

    Parameters
    ----------
    mechanism : Mechanism
    layout : Layout
        Of a row.
    noise : Noise
    denominator : float, or a sequence of n
        The expected number of rows; public, never a count of rows seen. A sequence makes n
        sums, and every tensor of state, sums and releases has a leading ``n``.
    device : torch.device or str
        Where rows come on.
    exact : bool
        Whether sums merge exactly. False for one step of local training, whose sums nobody
        merges, counts or orders; it reads nothing back from a GPU.

    Raises
    ------
    FedsimError
        If a denominator is not positive, the noise cannot be split among the segments, or it is
        correlated over rounds and the mechanism changes with them.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        layout: Layout,
        *,
        noise: Noise,
        denominator: float | Sequence[float],
        device: torch.device | str = "cpu",
        exact: bool = True,
    ) -> None:
        numbers = np.atleast_1d(denominator).tolist()
        if not all(r > 0 for r in numbers):
            raise FedsimError(f"denominator is {denominator}; it must be above 0.")
        if noise.correlated and mechanism.init(layout):
            raise FedsimError(
                f"noise is correlated over rounds, and {mechanism} changes with them: one run "
                "has one bound; choose one that stays, such as clipping."
            )
        self.mechanism, self.layout, self.noise = mechanism, layout, noise
        splits = {r: mechanism.noise_multipliers(noise.multiplier, r, layout) for r in numbers}
        self._splits = [splits[r] for r in numbers]
        self._one = np.ndim(denominator) == 0
        self._terms = Terms(
            segments=mechanism.cover(layout),
            sides=mechanism.sides,
            split=self._splits[0],
            owners=None if self._one else len(numbers),
            device=torch.device(device),
            # Without a guarantee something beside the noise decides, which has only its grid.
            exact=exact or mechanism.guarantee == "none",
            double=layout.dtype == torch.float64,
        )
        self._denominators = self._per_owner([{"r": float(r)} for r in numbers])["r"]
        self._multipliers = self._per_owner(self._splits)

    def _per_owner(self, splits: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
        """Noise multipliers by name, ``[...]``."""
        zeros = self._terms.zeros
        return {
            name: zeros.new_tensor([split[name] for split in splits]).view(zeros.shape)
            for name in splits[0]
        }

    def start(self, state: State, active: int | None = None) -> PartialSum:
        """Empty sums for one round.

        Parameters
        ----------
        state : State
            Of n owners, entries are ``[active, ...]``.
        active : int, optional
            The first so many of n owners; the others have left.
        """
        terms = self._terms if active is None else replace(self._terms, owners=active)
        before = state_on(state, terms.device)
        ready = [
            segment.bound.ready(state_of(before, segment.prefix)) for segment in terms.segments
        ]
        return PartialSum(terms, before, ready)

    def start_bounding(self, bounding: State) -> PartialSum:
        """Empty sums from `Mechanism.bounding_state`: they are added to, not released."""
        ready = state_on(bounding, self._terms.device)
        prefixes = [segment.prefix for segment in self._terms.segments]
        return PartialSum(self._terms, {}, [state_of(ready, prefix) for prefix in prefixes])

    def release(
        self, total: PartialSum, *sources: NoiseSource, asked: int | None = None
    ) -> Release:
        """Noise the sums, once, and divide.

        Parameters
        ----------
        total : PartialSum
        sources : NoiseSource
            One for each owner.
        asked : int, optional
            For a sum of shares: how many clients were asked. The server then adds only what
            the missing ones would have.
        """
        count = 0 if asked is None else total.count
        units, kept = self.noised(
            total,
            sources,
            None if asked is None else lambda z: top_up_multiplier(z, asked, count),
        )
        r = _first(self._denominators, total)
        state: dict[str, Tensor] = {NOISE_PREFIX + name: tensor for name, tensor in kept.items()}
        sides: dict[str, Number] = {}
        info: dict[str, float] = {}
        means = []
        for summed in total.segments:
            prefix, bound = summed.segment.prefix, summed.segment.bound
            released = self._released(total, summed, units, r)
            new = bound.next(state_of(total.before, prefix), summed.ready, released)
            means.append(released.mean)
            state |= {prefix + name: tensor for name, tensor in new.items()}
            sides |= {prefix + name: mean for name, mean in released.sides.items()}
            if self._one:
                shown = bound.info(summed.ready, new, summed.segment.layout.d)
                info |= {prefix + name: number for name, number in shown.items()}
        for side in self._terms.sides:
            if side.name in units:
                unit = total.grids[side.name].unit
                sides[side.name] = self._mean(units[side.name], unit, side.high / 2, r)
        return Release(total.joined(means), state, sides, info)

    def _released(
        self, total: PartialSum, summed: SegmentSum, units: Mapping[str, Tensor], r: Tensor
    ) -> Released:
        """A segment's mean in the parameters' coordinates, and its scalars."""
        prefix, bound, grids = summed.segment.prefix, summed.segment.bound, summed.grids
        tallies, sides = {}, {}
        for name, scalar in bound.scalars.items():
            sums, unit = units[prefix + name], grids[name].unit
            if scalar.unit is None:
                sides[name] = self._mean(sums, unit, scalar.center, r)
            else:
                tallies[name] = sums[..., 0] * unit
        # A unit is a power of two: one division rounds as a product and a division would.
        divisor = bound.divisor(tallies, r) / grids["sum"].unit
        mean = bound.restore(units[prefix + "sum"].div_(divisor[..., None]), summed.ready)
        raw = None
        if bound.keeps_raw:
            raw = units[prefix + "raw"].div_((r / grids["raw"].unit)[..., None])
        multipliers = {
            name: _first(self._multipliers[prefix + name], total)[..., None]
            for name in ("sum", *sides)
        }
        return Released(mean, sides, multipliers, r[..., None], raw)

    def _mean(self, sums: Tensor, unit: Tensor, center: float, r: Tensor) -> Number:
        """Mean of a scalar from its sum ``[..., 1]``."""
        mean = center + sums[..., 0] * unit / r
        return float(mean) if self._one else mean

    def noised(
        self,
        total: PartialSum,
        sources: Sequence[NoiseSource],
        change: Callable[[float], float] | None = None,
    ) -> tuple[dict[str, Tensor], NoiseState]:
        """Every sum in units of its grid, with the noise; and what the noise keeps.

        Noise is drawn in the order of the noise multipliers, for each name in one piece, so that
        an owner's is the same alone and among others. It is rounded once, to the sum's grid:
        that is the rounding of (sum + noise), post-processing of the Gaussian mechanism.

        Parameters
        ----------
        change : callable, optional
            From each noise multiplier to the one to draw at: that of a share, or of a top-up.
        """
        grids, split, multipliers = total.grids, self._splits[0], self._multipliers
        kept: NoiseState = {
            name.removeprefix(NOISE_PREFIX): tensor
            for name, tensor in total.before.items()
            if name.startswith(NOISE_PREFIX)
        }
        if change is not None:
            splits = [{name: change(z) for name, z in split.items()} for split in self._splits]
            split, multipliers = splits[0], self._per_owner(splits)
        units = {name: grid.units() for name, grid in grids.items() if split.get(name, 0.0) == 0}
        names = [name for name, z in split.items() if 0 < z < math.inf]
        if not names:
            return units, kept
        sizes = [grids[name].coarse.shape[-1] for name in names]
        fresh = normals(sources, sizes, self._terms.device)
        fresh = fresh[0] if self._one else fresh
        noise, kept = self.noise.combine(fresh, kept or self.noise.start())
        if self.noise.correlated:  # what is kept must not be rounded with what is released
            noise = noise.clone()
        for name, draws in zip(names, noise.split(sizes, dim=-1), strict=True):
            std = _first(multipliers[name], total) * grids[name].radius / grids[name].unit
            draws.mul_(std[..., None]).round_()
            # One vector becomes the release; of several owners' the sums do, which are used up.
            sums = grids[name].on_grid()
            units[name] = draws.add_(sums) if self._one else sums.add_(draws)
        return units, kept


def _first(numbers: Tensor, total: PartialSum) -> Tensor:
    """Those of the owners that are still there."""
    return numbers if total.terms.owners is None else numbers[: total.terms.owners]

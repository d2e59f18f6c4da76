"""The one releaser: noisy sums of n owners, for any rows, bounds and noise.

A server releases one sum, clients at example level one each, and a client's share is the noisy
sum of its one row. What a mechanism is composed of is data here: its `Segment` and `Side`.

A sum on a grid plus noise rounded to the same grid is the rounding of (sum + Gaussian noise), that
is, post-processing of the Gaussian mechanism; and the bits of the released number do not tell
which sum it came from, as those of an unrounded floating-point sum do (Mironov 2012).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import EllipsisType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.kernels.normals import prepare, sums_of_normals
from fedsim.mechanisms.base import (
    NOISE_PREFIX,
    Mechanism,
    Number,
    Released,
    Scalar,
    State,
    state_on,
)
from fedsim.mechanisms.partial import PartialSum, SegmentSum, Terms
from fedsim.privacy.noise import Noise, NoiseDraws, NoiseState, check_split, top_up_multiplier
from fedsim.rows.exact import GridSum
from fedsim.rows.layout import Layout


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


class NoisySum(Protocol):
    """One noisy sum: what a release plan says of it, or the server's request for a share of it."""

    @property
    def bound(self) -> Mechanism:
        """What a row may add to the sum."""

    @property
    def noise(self) -> Noise:
        """What is added to it."""

    @property
    def denominator(self) -> float:
        """The expected number of rows: public, never a count of rows seen."""


class Releaser:
    """Bounds, sums and noises the rows of one owner, or of n independent ones.

    Guarantee: each owner's release is one Gaussian of ``noise.multiplier`` on a sum to which a
    row adds at most the mechanism's C, all segments and scalars taken together, where the
    mechanism's `guarantee` is "gaussian" and the noise independent. It has no state: rounds
    may be started, summed and released anywhere.

    Parameters
    ----------
    plan : NoisySum, or a sequence of n
        Such as a `ReleasePlan`. A sequence makes n sums, of one bound and noise, and every tensor
        of state, sums and releases has a leading ``n``.
    layout : Layout
        Of a row.
    device : torch.device or str
        Where rows come on.
    exact : bool
        Whether sums merge exactly. False for one step of local training, whose sums are not
        merged, counted or ordered; it reads nothing back from a GPU.

    Raises
    ------
    FedsimError
        If a denominator is not positive, the noise cannot be split among the segments or is split
        into less, or it is correlated over rounds and the mechanism changes with them.
    """

    def __init__(
        self,
        plan: NoisySum | Sequence[NoisySum],
        layout: Layout,
        *,
        device: torch.device | str = "cpu",
        exact: bool = True,
    ) -> None:
        self._one = not isinstance(plan, Sequence)
        plans = plan if isinstance(plan, Sequence) else [plan]
        mechanism, noise = plans[0].bound, plans[0].noise
        numbers = [plan.denominator for plan in plans]
        for r in set(numbers):
            if not r > 0:
                raise FedsimError(f"denominator is {r}; it must be above 0.")
        if noise.correlated and mechanism.init(layout):
            raise FedsimError(
                f"noise is correlated over rounds (noise.name), and the bound {mechanism} "
                "(mechanism.name) changes with them: one run has one bound; choose one that stays, "
                "such as clipping."
            )
        self.mechanism, self.layout, self.noise = mechanism, layout, noise
        splits = {r: mechanism.noise_multipliers(noise.multiplier, r, layout) for r in numbers}
        segments = mechanism.cover(layout)
        for split in splits.values():
            vectors = [f"{segment.prefix}sum" for segment in segments]
            check_split(noise.multiplier, split, vectors, mechanism)
        self._splits = [splits[r] for r in numbers]
        self._terms = Terms(
            segments=segments,
            sides=mechanism.sides,
            split=self._splits[0],
            owners=None if self._one else len(numbers),
            device=torch.device(device),
            # Without a guarantee there are bare sums, which only a grid makes exact.
            exact=exact or mechanism.guarantee == "none",
            double=layout.dtype == torch.float64,
        )
        self.most_rows = self._terms.most_rows
        """Up to how many rows a sum is exact; beyond, it is refused."""
        self._denominators = self._per_sum(numbers)
        self._multipliers = self._by_name(self._splits)

    def _per_sum(self, numbers: Sequence[float]) -> Tensor:
        zeros = self._terms.zeros
        return zeros.new_tensor(numbers).view(zeros.shape)

    def _by_name(self, splits: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
        """Noise multipliers ``[...]`` of each name."""
        return {name: self._per_sum([split[name] for split in splits]) for name in splits[0]}

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
        return PartialSum(terms, before, [segment.ready(before) for segment in terms.segments])

    def start_bounding(self, bounding: State) -> PartialSum:
        """Empty sums from `Mechanism.bounding_state`: they are added to, not released."""
        ready = state_on(bounding, self._terms.device)
        return PartialSum(self._terms, {}, [s.select(ready) for s in self._terms.segments])

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
        change = None
        if asked is not None:
            change = partial(top_up_multiplier, asked=asked, usable=total.count)
        units, noise_state = self.noised(total, sources, change)
        state: dict[str, Tensor] = {
            NOISE_PREFIX + name: tensor for name, tensor in noise_state.items()
        }
        info: dict[str, float] = {}
        means, sides = [], self._sides(total, units)
        for summed in total.segments:
            segment, bound = summed.segment, summed.segment.bound
            released = self._released(summed, units, sides, total.terms.active_owners)
            new = bound.next(segment.select(total.before), summed.ready, released)
            means.append(released.mean)
            state |= segment.named(new)
            if self._one:
                info |= segment.named(bound.info(summed.ready, new, segment.layout.d))
        return Release(total.joined(means), state, sides, info)

    def _sides(self, total: PartialSum, units: Mapping[str, Tensor]) -> dict[str, Number]:
        """Means of all scalars that are released, by their names in the mechanism."""
        r = self._denominators[total.terms.active_owners]
        scalars: dict[str, Scalar] = {}
        for segment in self._terms.segments:
            scalars |= segment.named(segment.bound.scalars)
        scalars |= {side.name: side.scalar for side in self._terms.sides}
        means = {
            name: scalar.center + units[name][..., 0] * total.grids[name].unit / r
            for name, scalar in scalars.items()
            if name in units
        }
        return {name: float(mean) if self._one else mean for name, mean in means.items()}

    def _released(
        self,
        summed: SegmentSum,
        units: Mapping[str, Tensor],
        sides: Mapping[str, Number],
        active_owners: slice | EllipsisType,
    ) -> Released:
        """A segment's mean in the parameters' coordinates, and what goes with it."""
        segment, bound, grids = summed.segment, summed.segment.bound, summed.grids
        units, r = segment.select(units), self._denominators[active_owners][..., None]
        bare_sums = {name: units[name] * grids[name].unit[..., None] for name in bound.bare_sums}
        # A unit is a power of two: one division rounds as a product and a division would.
        divisor = bound.divisor(bare_sums, r) / grids["sum"].unit[..., None]
        mean = bound.restore(units["sum"].div_(divisor), summed.ready)
        z = self._multipliers[segment.prefix + "sum"][active_owners][..., None]
        return Released(mean, segment.select(sides), z, r, bare_sums)

    def draw_sizes(self, total: PartialSum) -> list[int]:
        """How many numbers a release of ``total`` asks of each source at a time."""
        return [*_drawn(self._splits[0], total.grids).values()]

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
        noise_state: NoiseState = {
            name.removeprefix(NOISE_PREFIX): tensor
            for name, tensor in total.before.items()
            if name.startswith(NOISE_PREFIX)
        }
        if change is not None:
            splits = [{name: change(z) for name, z in split.items()} for split in self._splits]
            split, multipliers = splits[0], self._by_name(splits)
        units = {name: grid.units() for name, grid in grids.items() if split.get(name, 0.0) == 0}
        sizes = _drawn(split, grids)
        if not sizes:
            return units, noise_state

        def drawn(age: int, number: int) -> Tensor:
            of_round = [source.at(age, number) for source in sources]
            draws = normals(of_round, [*sizes.values()], self._terms.device)
            return draws[0] if self._one else draws

        noise, noise_state = self.noise.combine(
            NoiseDraws(sources[0].round, drawn), noise_state or self.noise.start()
        )
        # Only what is released is rounded: rounding errors must not enter what the noise keeps.
        if self.noise.correlated:
            noise = noise.clone()
        for name, draws in zip(sizes, noise.split([*sizes.values()], dim=-1), strict=True):
            multiplier = multipliers[name][total.terms.active_owners]
            std = multiplier * grids[name].radius / grids[name].unit
            draws.mul_(std[..., None]).round_()
            # Added in place, where there is the less to allocate: the one owner's draws are a
            # tensor of their own, those of n owners are strided pieces of what was drawn.
            sums = grids[name].on_grid()
            units[name] = draws.add_(sums) if self._one else sums.add_(draws)
        return units, noise_state


def _drawn(split: Mapping[str, float], grids: Mapping[str, GridSum]) -> dict[str, int]:
    """The sums that noise is drawn for, in that order, and their sizes."""
    return {name: grids[name].coarse.shape[-1] for name, z in split.items() if 0 < z < math.inf}


Array = npt.NDArray[np.float64]

NUMBERS = 64
"""Draws of one round, or step, that share them are numbered below this."""


@dataclass(frozen=True)
class NoiseSource:
    """Where Gaussian draws come from; drawing advances the generator.

    Parameters
    ----------
    generator : numpy.random.Generator
        Keyed (`Randomness.generator`) or seeded from the operating system.
    hardened : bool
        Make each value of four draws, halved (Holohan and Braghin 2021, n = 2), at four times the
        cost. The floating-point values that one normal draw can take have gaps, and a released
        number that only one of two candidate sums can reach reveals which it was (Mironov 2012).
        Sums of four draws lie far denser, and recovering the generator's output bits from one
        means inverting that sum.
    round : int
        Which the draws are of, from 1 on.
    elsewhere : callable ``(age, number) -> generator``, optional
        Of the round so many before this one, or of other draws of a round, where there are any.
    """

    generator: np.random.Generator
    hardened: bool = False
    round: int = 1
    elsewhere: Callable[[int, int], np.random.Generator] | None = field(default=None, repr=False)

    def at(self, age: int, number: int) -> NoiseSource:
        """The source of the round so many before, or of other draws of a round."""
        if not (age or number):
            return self
        if self.elsewhere is None:
            raise FedsimError("noise that is correlated over rounds needs the draws of others.")
        generator = self.elsewhere(age, number)
        return NoiseSource(generator, self.hardened, self.round - age, self.elsewhere)

    def normal(self, size: int) -> Array:
        """Standard normal draws, float64 ``[size]``."""
        draws = sums_of_normals(self.generator, size, terms=4 if self.hardened else 1)
        if self.hardened:
            draws *= 0.5
        return draws


def normals(sources: Sequence[NoiseSource], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Standard normal draws ``[n, sum of sizes]``, one row from each source.

    They are drawn here, in parts of these sizes as one release after another draws them, so
    that every device gets the same, and go to ``device`` in one asynchronous copy.
    """
    # Pinned memory is not used again before the copy from it is done.
    host = torch.empty(
        len(sources), sum(sizes), dtype=torch.float64, pin_memory=device.type == "cuda"
    )
    for row, source in zip(host.numpy(), sources, strict=True):
        np.concatenate([source.normal(size) for size in sizes], out=row)
    return host.to(device, non_blocking=True)


def prefetched(source: NoiseSource, sizes: Sequence[int]) -> NoiseSource:
    """The same source, whose next draws are made in a thread of their own from now on.

    numpy draws without Python's lock. Nothing else may draw from the generator then.

    Parameters
    ----------
    source : NoiseSource
    sizes : sequence of int
        What `NoiseSource.normal` will be asked for, in this order.
    """
    # Not in the thread: a worker that is forked while the thread holds a lock would wait for ever,
    # since its process has no thread to release it.
    prepare()
    thread = ThreadPoolExecutor(1, "noise")
    drawn = deque([thread.submit(source.normal, size) for size in sizes])
    thread.shutdown(wait=False)  # it ends with the last of them
    return _Prefetched(**vars(source), drawn=drawn)


@dataclass(frozen=True)
class _Prefetched(NoiseSource):
    """Its first draws were made, or are being made, in a thread."""

    drawn: deque[Future[Array]] = field(kw_only=True, repr=False)

    def normal(self, size: int) -> Array:
        """The next of the draws; waits until they are made."""
        draws = self.drawn.popleft().result()
        assert len(draws) == size, "draws are asked for in other sizes than they were made in"
        return draws

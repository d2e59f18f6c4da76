"""The one releaser: noisy sums of n owners, for any rows, mechanisms and noise.

A server releases one sum, at example level each client releases one, and a client's share is the
noisy sum of its single row. A mechanism's parts are data here: `Segment` and `SideScalar`.

A sum on a grid plus noise rounded to the same grid equals (sum + Gaussian noise), rounded: it is
post-processing of the Gaussian mechanism. The bits of the released number do not reveal which sum
it came from, as those of an unrounded floating-point sum would (Mironov 2012).
"""

from __future__ import annotations

import copy
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import EllipsisType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedsim.array_types import Floats
from fedsim.errors import FedsimError
from fedsim.kernels.normals import prepare, sums_of_normals
from fedsim.mechanisms.base import (
    NOISE_PREFIX,
    Mechanism,
    Number,
    Released,
    ScalarRange,
    State,
    state_on,
)
from fedsim.mechanisms.partial import PartialSum, SegmentSum, SumDefinition
from fedsim.privacy.noise import Noise, NoiseDraws, NoiseState, check_split
from fedsim.rows.layout import Layout

_DENOMINATOR = "denominator"


@dataclass(frozen=True)
class Release:
    """Result of one round: the noisy mean, and the next state.

    Attributes
    ----------
    mean : float64 ``[d]``, or ``[n, d]`` for n owners
        Noisy mean row, to be added to the parameters.
    state : State
        State of the mechanism and of the noise for the next round.
    side_scalars : mapping of name to float, or to float64 ``[n]``
        Noisy means of the scalars.
    info : mapping of name to float
        Post-processed diagnostics (such as the ``clip-norm`` in use), as public as the mean;
        empty for n owners.
    """

    mean: Tensor
    state: State
    side_scalars: Mapping[str, Number] = field(default_factory=dict)
    info: Mapping[str, float] = field(default_factory=dict)


class NoisySum(Protocol):
    """What defines one noisy sum; a release plan, or a server's request for shares, has it."""

    @property
    def mechanism(self) -> Mechanism:
        """Mechanism that bounds a row's contribution to the sum."""

    @property
    def noise(self) -> Noise:
        """Noise on the sum."""

    @property
    def denominator(self) -> float:
        """Expected number of rows: public, never a count of actual rows."""


class Releaser:
    """Bounds, sums and noises the rows of one owner, or of n independent owners.

    The rounds that it serves; parameters and state are public, sums and sources secret::

        releaser, state = Releaser(plan, layout), plan.mechanism.init(layout)
        for number in range(1, plan.rounds + 1):
            total = releaser.start(state)  # empty
            for rows in blocks(vector, number):
                total.add(rows)  # bounds and adds them: exactly, so in any order, on any worker
            release = releaser.release(total, source_of(number))  # noise once, then the denominator
            vector, state = vector + release.mean, release.state

    Guarantee: if the mechanism's `guarantee` is "gaussian" and the noise is independent, each
    owner's release is one Gaussian of ``noise.multiplier`` on a sum to which a row adds at most
    the mechanism's C, all segments and scalars together. A releaser has no state: a round may be
    started, summed and released by different processes.

    Parameters
    ----------
    plan : NoisySum, or a sequence of n
        Such as a `ReleasePlan`. With a sequence there are n sums, all with the first one's
        mechanism and noise, and every tensor of state, sums and releases has a leading ``n``.
    layout : Layout
        Layout of a row.
    device : torch.device or str
        Device of the rows.
    exact : bool
        Whether sums merge exactly. False for a step of local training, whose sums are not
        merged, counted or ordered; nothing is then read back from a GPU.

    Raises
    ------
    FedsimError
        If a denominator is not positive, if the noise cannot be split among the segments or the
        parts cost more than it, or if it is correlated and the mechanism changes over rounds.
    """

    def __init__(
        self,
        plan: NoisySum | Sequence[NoisySum],
        layout: Layout,
        *,
        device: torch.device | str = "cpu",
        exact: bool = True,
    ) -> None:
        self._is_single = not isinstance(plan, Sequence)
        plans = plan if isinstance(plan, Sequence) else [plan]
        mechanism, noise = plans[0].mechanism, plans[0].noise
        numbers = [plan.denominator for plan in plans]
        for r in set(numbers):
            if not r > 0:
                raise FedsimError(f"denominator is {r}; it must be above 0.")
        if noise.correlated and mechanism.init(layout):
            raise FedsimError(
                "noise is correlated over rounds (noise.name), and the mechanism "
                f"{type(mechanism).__name__} (mechanism.name) changes between rounds; use a "
                "constant one (clipping)."
            )
        self.mechanism, self.layout, self.noise = mechanism, layout, noise
        splits = {r: mechanism.noise_multipliers(noise.multiplier, r, layout) for r in numbers}
        segments = mechanism.segments(layout)
        for split in splits.values():
            vectors = [f"{segment.prefix}sum" for segment in segments]
            check_split(noise.multiplier, split, vectors, mechanism)
        self._definition = SumDefinition(
            segments=segments,
            side_scalars=mechanism.side_scalars,
            split=splits[numbers[0]],
            owners=None if self._is_single else len(numbers),
            device=torch.device(device),
            # Without a guarantee there are noiseless sums, which need the grid to be exact.
            exact=exact or mechanism.guarantee == "none",
            double=layout.dtype == torch.float64,
        )
        self.max_rows = self._definition.max_rows
        """Largest number of rows of a sum, up to which it is exact; more are refused."""
        self._denominators = self._per_sum(numbers)
        self._multipliers = {  # ``[...]``, by the name of the part
            name: self._per_sum([splits[r][name] for r in numbers])
            for name in self._definition.split
        }

    def _per_sum(self, numbers: Sequence[float]) -> Tensor:
        zeros = self._definition.zeros
        return zeros.new_tensor(numbers).view(zeros.shape)

    @property
    def owner_numbers(self) -> dict[str, Tensor]:
        """Each owner's denominator and noise multipliers, float64 ``[n]`` by name."""
        return {_DENOMINATOR: self._denominators, **self._multipliers}

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> Releaser:
        """The same releaser for other owners, of whom these are the `owner_numbers`."""
        other = copy.copy(self)
        other._multipliers = dict(numbers)
        other._denominators = other._multipliers.pop(_DENOMINATOR)
        return other

    def start(self, state: State, active: int | None = None) -> PartialSum:
        """Empty sums for one round.

        Parameters
        ----------
        state : State
            The state before the round; for n owners, entries are ``[active, ...]``.
        active : int, optional
            Only the first ``active`` of n owners take part; the others have finished.
        """
        definition = (
            self._definition if active is None else replace(self._definition, owners=active)
        )
        before = state_on(state, definition.device)
        return PartialSum(
            definition, before, [segment.round_state(before) for segment in definition.segments]
        )

    def start_bounding(self, bounding: State) -> PartialSum:
        """Empty sums from `Mechanism.bounding_state`: rows can be added, but not released."""
        round_state = state_on(bounding, self._definition.device)
        return PartialSum(
            self._definition, {}, [s.select(round_state) for s in self._definition.segments]
        )

    def release(
        self, total: PartialSum, *sources: NoiseSource | BlockNoise, missing: float = 1.0
    ) -> Release:
        """Add noise to the sums, once, and divide.

        Parameters
        ----------
        total : PartialSum
        sources : NoiseSource or BlockNoise
            One for each owner, or one for all.
        missing : float
            The part of the noise's variance that the rows do not bring with them, from 0 to 1.
        """
        drawn = None if missing == 1 else partial(operator.mul, math.sqrt(missing))
        units, noise_state = self.add_noise(total, sources, drawn)
        state: dict[str, Tensor] = {NOISE_PREFIX + k: tensor for k, tensor in noise_state.items()}
        info: dict[str, float] = {}
        means, side_scalars = [], self._noisy_scalar_means(total, units)
        for summed in total.segments:
            segment, mechanism = summed.segment, summed.segment.mechanism
            released = self._average_segment(
                summed, units, side_scalars, total.definition.active_owners
            )
            new = mechanism.next(segment.select(total.state_before), summed.round_state, released)
            means.append(released.mean)
            state |= segment.named(new)
            if self._is_single:
                info |= segment.named(mechanism.info(summed.round_state, new, segment.layout.d))
        return Release(total.join_segments(means), state, side_scalars, info)

    def _noisy_scalar_means(
        self, total: PartialSum, units: Mapping[str, Tensor]
    ) -> dict[str, Number]:
        """Noisy means of all released scalars, by their names in the mechanism."""
        r = self._denominators[total.definition.active_owners]
        scalars: dict[str, ScalarRange] = {}
        for segment in self._definition.segments:
            scalars |= segment.named(segment.mechanism.scalars)
        scalars |= {side.name: side.value_range for side in self._definition.side_scalars}
        means = {
            name: scalar.center + units[name][..., 0] * total.grids[name].unit / r
            for name, scalar in scalars.items()
            if name in units
        }
        return {name: float(mean) if self._is_single else mean for name, mean in means.items()}

    def _average_segment(
        self,
        summed: SegmentSum,
        units: Mapping[str, Tensor],
        side_scalars: Mapping[str, Number],
        active_owners: slice | EllipsisType,
    ) -> Released:
        """A segment's mean in the parameters' coordinates, and what else enters the next state."""
        segment, mechanism, grids = summed.segment, summed.segment.mechanism, summed.grids
        units, r = segment.select(units), self._denominators[active_owners][..., None]
        noiseless_sums = {
            name: units[name] * grids[name].unit[..., None] for name in mechanism.noiseless_sums
        }
        # The unit is a power of two, so that folding it into the divisor changes no rounding.
        divisor = mechanism.divisor(noiseless_sums, r) / grids["sum"].unit[..., None]
        mean = mechanism.restore(units["sum"].div_(divisor), summed.round_state)
        z = self._multipliers[segment.prefix + "sum"][active_owners][..., None]
        return Released(mean, segment.select(side_scalars), z, r, noiseless_sums)

    @property
    def draw_sizes(self) -> list[int]:
        """Sizes of the draws that a release takes from each source, in order."""
        return [*self._noise_sizes(self._definition.split).values()]

    def _noise_sizes(self, split: Mapping[str, float]) -> dict[str, int]:
        """Names of the sums that get noise, in the order of drawing, with their sizes."""
        segments = self._definition.segments
        vectors = {f"{segment.prefix}sum": segment.layout.d for segment in segments}
        return {name: vectors.get(name, 1) for name, z in split.items() if 0 < z < math.inf}

    def add_noise(
        self,
        total: PartialSum,
        sources: Sequence[NoiseSource | BlockNoise],
        drawn_multiplier: Callable[[Any], Any] | None = None,
    ) -> tuple[dict[str, Tensor], NoiseState]:
        """Every noisy sum in units of its grid, and the noise's next state.

        Noise is drawn in the order of the noise multipliers, for each name at once, so that an
        owner's noise is the same alone and among others. It is rounded once, to the sum's grid:
        this is the rounding of (sum + noise), post-processing of the Gaussian mechanism.

        Parameters
        ----------
        drawn_multiplier : callable, optional
            Maps a noise multiplier, or a tensor of them, to the one to draw at.
        """
        grids, split, multipliers = total.grids, self._definition.split, self._multipliers
        noise_state: NoiseState = {
            name.removeprefix(NOISE_PREFIX): tensor
            for name, tensor in total.state_before.items()
            if name.startswith(NOISE_PREFIX)
        }
        if drawn_multiplier is not None:
            split = {name: drawn_multiplier(z) for name, z in split.items()}
            # On the CPU, since a GPU divides by multiplying with a reciprocal, which rounds twice.
            multipliers = {k: drawn_multiplier(z.cpu()).to(z) for k, z in multipliers.items()}
        units = {name: grid.units() for name, grid in grids.items() if split.get(name, 0.0) == 0}
        sizes = self._noise_sizes(split)
        if not sizes:
            return units, noise_state

        def draws_of(age: int, number: int) -> Tensor:
            if isinstance(sources[0], BlockNoise):
                assert age == number == 0, "these are the draws of one release"
                return sources[0].draws
            of_round = [s.at(age, number) for s in sources if isinstance(s, NoiseSource)]
            draws = normals(of_round, [*sizes.values()], self._definition.device)
            return draws[0] if self._is_single else draws

        noise, noise_state = self.noise.combine(
            NoiseDraws(sources[0].round, draws_of), noise_state or self.noise.start()
        )
        # The noise may be one of the new state's tensors, which must not be rounded: use a copy.
        if self.noise.correlated:
            noise = noise.clone()
        for name, draws in zip(sizes, noise.split([*sizes.values()], dim=-1), strict=True):
            multiplier = multipliers[name][total.definition.active_owners]
            std = multiplier * grids[name].radius / grids[name].unit
            draws.mul_(std[..., None]).round_()
            # In place, into the contiguous one of the two: a single owner's draws are contiguous;
            # those of n owners are strided, and their sums are overwritten (``total`` is used up).
            sums = grids[name].on_grid()
            units[name] = draws.add_(sums) if self._is_single else sums.add_(draws)
        return units, noise_state


@dataclass(frozen=True)
class NoiseSource:
    """Source of Gaussian draws; drawing advances the generator.

    Parameters
    ----------
    generator : numpy.random.Generator
        Keyed (`Randomness.generator`), or seeded by the operating system.
    hardened : bool
        Whether each value is the sum of four draws, halved (Holohan and Braghin 2021, n = 2), at
        four times the cost. The floating-point values that a single normal draw can take have
        gaps, and a released number that only one of two candidate sums can reach reveals which it
        was (Mironov 2012). Sums of four draws are far denser, and recovering the generator's bits
        from one means inverting that sum.
    round : int
        Number of the round of the draws, from 1 on.
    other_generator : callable ``(age, number) -> generator``, optional
        Generators of earlier rounds (``age`` rounds ago), and of further draws of a round.
    """

    generator: np.random.Generator
    hardened: bool = False
    round: int = 1
    other_generator: Callable[[int, int], np.random.Generator] | None = field(
        default=None, repr=False
    )

    def at(self, age: int, number: int) -> NoiseSource:
        """Source of the draws ``age`` rounds ago, or of draws ``number`` of a round."""
        if not (age or number):
            return self
        if self.other_generator is None:
            raise FedsimError("noise correlated over rounds needs the draws of other rounds.")
        generator = self.other_generator(age, number)
        return NoiseSource(generator, self.hardened, self.round - age, self.other_generator)

    def normal(self, size: int) -> Floats:
        """Standard normal draws, float64 ``[size]``."""
        draws = sums_of_normals(self.generator, size, terms=4 if self.hardened else 1)
        if self.hardened:
            draws *= 0.5
        return draws


@dataclass(frozen=True)
class BlockNoise:
    """Standard normal draws of n owners for one release, ``[n, sum of sizes]``, made before it.

    For noise that is independent over rounds. The release overwrites them.
    """

    draws: Tensor
    round: int = 1


def normals(sources: Sequence[NoiseSource], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Standard normal draws ``[n, sum of sizes]``, one row from each source.

    They are drawn on the CPU, one size after the other, so that they are the same for every
    device, and sent to ``device`` in one asynchronous copy.
    """
    # The copy may outlive this function: torch does not reuse pinned memory before it is done.
    host = torch.empty(
        len(sources), sum(sizes), dtype=torch.float64, pin_memory=device.type == "cuda"
    )
    for row, source in zip(host.numpy(), sources, strict=True):
        start = 0
        for size in sizes:
            row[start : start + size] = source.normal(size)
            start += size
    return host.to(device, non_blocking=True)


def prefetched(source: NoiseSource, sizes: Sequence[int]) -> NoiseSource:
    """The same source, with its next draws made from now on in a background thread.

    numpy draws without Python's lock. Nothing else may use the generator meanwhile.

    Parameters
    ----------
    source : NoiseSource
    sizes : sequence of int
        Sizes of the next calls of `NoiseSource.normal`, in order.
    """
    # Not in the thread: a worker that is forked while the thread holds a lock would wait forever,
    # since no thread of its process releases it.
    prepare()
    thread = ThreadPoolExecutor(1, "noise")
    futures = deque([thread.submit(source.normal, size) for size in sizes])
    thread.shutdown(wait=False)  # the thread ends after the last draw
    return _Prefetched(**vars(source), futures=futures)


@dataclass(frozen=True)
class _Prefetched(NoiseSource):
    """A source whose first draws are made in a background thread."""

    futures: deque[Future[Floats]] = field(kw_only=True, repr=False)

    def normal(self, size: int) -> Floats:
        """The next draws, as soon as the thread has made them."""
        draws = self.futures.popleft().result()
        assert len(draws) == size, "draws are asked for in other sizes than they were made in"
        return draws

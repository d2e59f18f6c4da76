"""Releases in units of what one client may add, and lengths in standard deviations of noise.

An observer knows the mechanism, its public state and the ledger. The bound says how far a row
can reach along each coordinate; noise, in that unit, must be the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import chdtr

from fedsim.audit.checks import Check, Floats, Statistic, statistical
from fedsim.audit.observation import Observation, Target
from fedsim.mechanisms import Mechanism, State
from fedsim.privacy import Event
from fedsim.rows import Layout
from fedsim.rows.dense import scatter
from fedsim.rows.exact import grid_unit

SLACK = 1e-6
"""Rounding to the grid, and of differences of parameters."""
COARSE = 2.0**44
"""Grid steps beyond which a number in float64 no longer shows one."""


@dataclass(frozen=True)
class Scale:
    """The units of noise in one round, coordinate by coordinate.

    Attributes
    ----------
    center, half : float64 ``[d]``
        The sum's noise has standard deviation ``half`` times a noise multiplier, and a bounded
        row differs from ``center`` by no more than ``half`` in length, in those units.
    zero : float64 ``[d]``
        What a row of zeros adds to the sum, beside the center.
    step : float64 ``[d]``
        Of the grid that sums lie on, in units of ``half``.
    """

    center: Floats
    half: Floats
    zero: Floats
    step: Floats

    @classmethod
    def of(cls, mechanism: Mechanism, state: State, layout: Layout) -> Scale:
        """From the bounds' radii, and where they put a row of zeros and a row of ones."""
        center, half, step = (np.empty(layout.d) for _ in range(3))
        # A bound may center and stretch rows before it clips them, and undo that afterwards: what
        # it makes of zeros is the center, and of ones, less that, the stretch of each coordinate.
        for segment in mechanism.cover(layout):
            ready = segment.ready(state)
            zeros = torch.zeros(segment.layout.d, dtype=torch.float64)
            at_zero = segment.bound.restore(zeros, ready)
            at_one = segment.bound.restore(zeros + 1, ready)
            radius = float(segment.bound.radius(ready, segment.layout.d))
            scatter(torch.from_numpy(center), at_zero, segment.columns)
            scatter(torch.from_numpy(half), radius * (at_one - at_zero), segment.columns)
            scatter(torch.from_numpy(step), zeros + grid_unit(radius) / radius, segment.columns)
        still = torch.zeros(1, layout.d, dtype=torch.float64)
        zero = mechanism.bound(still, state, layout)[0].numpy() - center
        return cls(center, half, zero, step)

    def steps(self, mean: Floats, denominator: float, zeros: float = 0.0) -> Floats:
        """A mean ``[..., d]`` of so many rows of zeros and noise, in steps of the sum's grid."""
        # A row of zeros that is moved to a center is rounded to the grid there.
        shifted = zeros * np.trunc(self.zero / self.half / self.step)
        return np.asarray((mean - self.center) * denominator / self.half / self.step - shifted)


def shaped(states: Sequence[State]) -> bool:
    """Whether more than one number of a mechanism's state changes from round to round."""
    first, last = states[0], states[-1]
    changing = [
        name
        for name, tensor in first.items()
        if name in last and not torch.equal(tensor, last[name])
    ]
    return any(first[name].numel() > 1 for name in changing) or len(changing) > 1


def in_units(seen: Observation, target: Target) -> tuple[Floats, Floats]:
    """Noise of a run in which all clients sent zero: ``[rounds, d]`` twice.

    First over its noise multiplier, then in steps of the grid that it lies on: NaN in rounds where
    float64 parameters are too coarse to show these.
    """
    mechanism, layout, denominator = target.mechanism, target.layout, target.denominator
    units, steps = np.empty_like(seen.moves), np.empty_like(seen.moves)
    scale = Scale.of(mechanism, seen.states[0], layout)
    reached = np.abs(np.cumsum(seen.moves, axis=0)) + np.abs(seen.moves)
    for index, (row, move, count) in enumerate(zip(units, seen.moves, seen.sizes, strict=True)):
        if 0 < index < len(seen.states) and not _same(seen.states[index], seen.states[index - 1]):
            scale = Scale.of(mechanism, seen.states[index], layout)
        row[:] = ((move - scale.center) * denominator - count * scale.zero) / scale.half
        steps[index] = scale.steps(move, denominator, count)
        if (reached[index] * denominator > COARSE * scale.half * scale.step).any():
            steps[index] = np.nan
    return units, steps


def _same(state: State, previous: State) -> bool:
    return state.keys() == previous.keys() and all(
        torch.equal(tensor, previous[name]) for name, tensor in state.items()
    )


@dataclass(frozen=True)
class MeasuredNoise:
    """How large released noise is, estimated over whole runs.

    Attributes
    ----------
    stds : float64 ``[d]``
        Standard deviations in the unit of `in_units`, one for each layer.
    values : int
        How many values the least certain of them is an estimate from.
    layers : int
        How many estimates there are.
    """

    stds: Floats
    values: int
    layers: int

    @classmethod
    def of(cls, units: Floats, layers: Sequence[slice]) -> MeasuredNoise:
        """From ``units [..., d]`` of a model with these layers' columns."""
        stds = np.empty(units.shape[-1])
        for layer in layers:
            stds[layer] = np.sqrt(np.square(units[..., layer]).mean())
        width = min(layer.stop - layer.start for layer in layers)
        return cls(stds, width * (units.size // units.shape[-1]), len(layers))

    def of_round(self, seen: Observation, index: int, target: Target) -> Floats:
        """Standard deviation of a move in the round with this index, ``[d]``."""
        state = seen.states[min(index, len(seen.states) - 1)]
        half = Scale.of(target.mechanism, state, target.layout).half
        return self.stds * half / target.denominator


def length_check(
    name: str,
    looked: str,
    length: float,
    whose: str,
    allowed: float,
    noise: MeasuredNoise,
    shares: tuple[float, float] = (1.0, 0.0),
    beside: int = 1,
) -> Check:
    """Whether a move is longer than allowed, in standard deviations that are estimates.

    A variance from N values is a chi-square with N degrees over N; of a sum of two terms, the
    degrees are those of the mixture (Satterthwaite).

    Parameters
    ----------
    length : float
        In standard deviations of the noise.
    whose : str
        What moved the release so far.
    allowed : float
        In standard deviations of the noise that is charged.
    shares : tuple of float
        Parts of its square that are moves of parameters, and of scalars that are released.
    beside : int
        Degrees of freedom of these scalars' variances.
    """
    parts = np.array(shares) / (sum(shares) or 1.0)
    degrees = 1 / float((np.square(parts) / [noise.values, beside]).sum())

    def p(lengths: Floats, _: object) -> Floats:
        squares = np.square(np.maximum(lengths, 1e-150))
        ratio = np.where(np.isfinite(squares), (allowed * (1 + SLACK)) ** 2 / squares, 0.0)
        # The longest move is along the layer whose noise happens to be estimated as smallest.
        return np.asarray(np.minimum(1.0, noise.layers * chdtr(degrees, degrees * ratio)))

    words = f"{{}} std of the noise, {whose} ({allowed:.5g} is claimed)"
    compared = Statistic(words, np.array([length]), p, allowed)
    return statistical("bound", name, looked, [compared])


def allowed_length(event: Event) -> float:
    """Standard deviations of the noise by which the event lets one row move a release."""
    return (2.0 if event.adjacency == "replace-one" else 1.0) / event.total_noise_multiplier

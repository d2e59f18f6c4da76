"""Releases in units of what one client may add: from moves of parameters to standard noise.

An observer knows the mechanism, its public state and the ledger. The bound says how far a row
can reach along each coordinate; noise, in that unit, must be the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedsim.audit.checks import Floats
from fedsim.audit.observation import Observation, Parameters, Target, columns
from fedsim.mechanisms import Mechanism, State
from fedsim.rows import Layout
from fedsim.rows.dense import scatter
from fedsim.rows.exact import grid_unit


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


COARSE = 2.0**44
"""Grid steps beyond which a number in float64 no longer shows one."""


def shaped(states: Sequence[State]) -> bool:
    """Whether more than one number of a mechanism's state changes from round to round."""
    first, last = states[0], states[-1]
    changing = [
        name
        for name, tensor in first.items()
        if name in last and not torch.equal(tensor, last[name])
    ]
    return any(first[name].numel() > 1 for name in changing) or len(changing) > 1


def in_units(seen: Observation, target: Target, start: Parameters) -> tuple[Floats, Floats]:
    """Noise of a run in which all clients sent zero: ``[rounds, d]`` twice.

    First over its noise multiplier, then in steps of the grid that it lies on: NaN in rounds where
    float64 parameters are too coarse to show these.
    """
    mechanism, layout, denominator = target.mechanism, Layout.of(start), target.denominator
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
    """How large released noise is, found over whole runs.

    Attributes
    ----------
    stds : float64 ``[d]``
        Standard deviations in the unit of `in_units`, one for each layer.
    values : int
        How many values the least certain of them is an estimate from.
    layers : int
        How many estimates there are.
    target : Target
    layout : Layout
    """

    stds: Floats
    values: int
    layers: int
    target: Target
    layout: Layout

    @classmethod
    def of(cls, units: Floats, target: Target, start: Parameters) -> MeasuredNoise:
        """From ``units [runs, rounds, d]`` of a model with these parameters."""
        layers = columns(start)
        stds = np.empty(units.shape[-1])
        for layer in layers:
            stds[layer] = np.sqrt(np.square(units[..., layer]).mean())
        width = min(layer.stop - layer.start for layer in layers)
        values = width * units.shape[0] * units.shape[1]
        return cls(stds, values, len(layers), target, Layout.of(start))

    def of_round(self, seen: Observation, index: int) -> Floats:
        """Standard deviation of a move in the round with this index, ``[d]``."""
        state = seen.states[min(index, len(seen.states) - 1)]
        half = Scale.of(self.target.mechanism, state, self.layout).half
        return self.stds * half / self.target.denominator

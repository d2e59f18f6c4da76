"""Measures how far a canary moved a release, in standard deviations of its noise.

An observer knows the mechanism, its public state and the ledger. The bound determines how far a
row can reach along each coordinate; in that unit, noise must have the same size everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import chdtr
from whitebox.target import Observation, Target

from fedsim.array_types import Floats
from fedsim.audit.findings import Finding, Statistic, statistical
from fedsim.audit.user_checks import Scale
from fedsim.mechanisms import State
from fedsim.privacy import Event

SLACK = 1e-6
"""Relative tolerance for rounding to the grid, and of differences of parameters."""
COARSE = 2.0**44
"""Numbers of more grid steps are too large for float64 to resolve a step."""


def changes_shape(states: Sequence[State]) -> bool:
    """Whether more than one number of a mechanism's state changes over rounds."""
    first, last = states[0], states[-1]
    changing = [n for n in first if n in last and not torch.equal(first[n], last[n])]
    return len(changing) > 1 or any(first[name].numel() > 1 for name in changing)


def in_units(observed: Observation, target: Target) -> tuple[Floats, Floats]:
    """Noise of a run in which all clients sent zeros: ``[rounds, d]`` in two units.

    First in units of `Scale.radius`, in which its standard deviation is the noise multiplier; then
    in grid steps, with NaN for rounds whose float64 parameters cannot resolve a step.
    """
    denominator = target.plan.denominator
    units, steps = np.empty_like(observed.moves), np.empty_like(observed.moves)
    reached = np.abs(np.cumsum(observed.moves, axis=0)) + np.abs(observed.moves)
    known: State | None = None
    for index, (move, count) in enumerate(zip(observed.moves, observed.sizes, strict=True)):
        state = observed.states[min(index, len(observed.states) - 1)]
        if known is None or not _same(state, known):
            scale, known = Scale.from_mechanism(target.mechanism, state, target.layout), state
        units[index] = ((move - scale.center) * denominator - count * scale.zero) / scale.radius
        steps[index] = scale.steps(move, denominator, count)
        if (reached[index] * denominator > COARSE * scale.radius * scale.step).any():
            steps[index] = np.nan
    return target.whitened(units), steps


def _same(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[n], other[n]) for n in state)


@dataclass(frozen=True)
class MeasuredNoise:
    """Size of released noise, estimated over whole runs.

    Attributes
    ----------
    stds : float64 ``[d]``
        Standard deviations in the unit of `in_units`, equal within a layer.
    values : int
        Number of values behind the least certain estimate.
    layers : int
        Number of estimates.
    """

    stds: Floats
    values: int
    layers: int

    @classmethod
    def of(cls, units: Floats, layers: Sequence[slice]) -> MeasuredNoise:
        """Estimate from ``units [..., d]`` of a model with these layers' columns."""
        stds = np.empty(units.shape[-1])
        for layer in layers:
            stds[layer] = np.sqrt(np.square(units[..., layer]).mean())
        width = min(layer.stop - layer.start for layer in layers)
        return cls(stds, width * (units.size // units.shape[-1]), len(layers))

    def of_round(self, observed: Observation, index: int, target: Target) -> Floats:
        """Standard deviation of a move's noise in the round with this index, ``[d]``."""
        state = observed.states[min(index, len(observed.states) - 1)]
        radius = Scale.from_mechanism(target.mechanism, state, target.layout).radius
        return self.stds * radius / target.plan.denominator


def length_finding(
    examined: str,
    length: float,
    whose: str,
    allowed: float,
    noise: MeasuredNoise,
    shares: tuple[float, float] = (1.0, 0.0),
    scalar_degrees: int = 1,
) -> Finding:
    """Whether a move is longer than allowed, measured in estimated standard deviations.

    A variance estimated from N values is distributed as a chi-square with N degrees, over N; for a
    sum of two terms the degrees are approximated (Satterthwaite).

    Parameters
    ----------
    examined : str
    length : float
        Length of the move, in standard deviations of the measured noise.
    whose : str
        What moved the release so far, in words.
    allowed : float
        Allowed length, in standard deviations of the charged noise.
    noise : MeasuredNoise
    shares : tuple of float
        Shares of the squared length that are due to parameters, and to released scalars.
    scalar_degrees : int
        Degrees of freedom of the scalars' variances.
    """
    parts = np.array(shares) / (sum(shares) or 1.0)
    degrees = 1 / float((np.square(parts) / [noise.values, scalar_degrees]).sum())

    def p(lengths: Floats, _: object) -> Floats:
        squares = np.square(np.maximum(lengths, 1e-150))
        ratio = np.where(np.isfinite(squares), (allowed * (1 + SLACK)) ** 2 / squares, 0.0)
        # A union bound: the longest move tends to be in the layer with the smallest estimate.
        return np.asarray(np.minimum(1.0, noise.layers * chdtr(degrees, degrees * ratio)))

    words = f"{{}} std of the noise, {whose} ({allowed:.5g} is claimed)"
    return statistical(examined, Statistic(words, np.array([length]), p, allowed))


def allowed_length(event: Event) -> float:
    """How far the event lets one row move a release, in standard deviations of the noise."""
    return (2.0 if event.adjacency == "replace-one" else 1.0) / event.total_noise_multiplier


def scalars_moved(
    absent: Observation, present: Observation, stds: Mapping[str, float]
) -> tuple[float, str | None]:
    """How far released scalars moved in the last round; and one that moved without noise."""
    farthest, without_noise = 0.0, None
    before, after = (run.statistics[-1] if run.statistics else {} for run in (absent, present))
    for name, std in stds.items():
        difference = abs(after.get(name, 0.0) - before.get(name, 0.0))
        if difference <= 1e-12 * (1 + abs(before.get(name, 0.0))):
            continue
        if std == 0:
            without_noise = name
        else:
            farthest = max(farthest, difference / std)
    return farthest, without_noise

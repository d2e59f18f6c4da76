"""Releases in units of what one client may add: from moves of parameters to standard noise.

An observer knows the mechanism, its public state and the ledger. The bound says how far a row
can reach along each coordinate; noise, in that unit, must be the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedsim.audit.observe import Observation
from fedsim.mechanisms import Mechanism, State

__all__ = ["MeasuredNoise", "Scale", "in_units", "shaped"]

Floats = npt.NDArray[np.float64]

FAR = 1e12
CHUNK = 256


@dataclass(frozen=True)
class Scale:
    """How far a row reaches along each coordinate in one round.

    Attributes
    ----------
    center, half : float64 ``[d]``
        A bounded row lies within ``center +- half`` in every coordinate.
    zero : float64 ``[d]``
        What a row of zeros adds to the sum, beside the center.
    """

    center: Floats
    half: Floats
    zero: Floats

    @classmethod
    def of(cls, mechanism: Mechanism, state: State, d: int) -> Scale:
        """Found with rows that point far along each coordinate, both ways."""
        ends = np.empty((2, d))
        for sign, row in ((1.0, ends[0]), (-1.0, ends[1])):
            for start in range(0, d, CHUNK):
                count = min(CHUNK, d - start)
                rows = torch.zeros(count, d, dtype=torch.float64)
                rows[torch.arange(count), torch.arange(start, start + count)] = sign * FAR
                bounded = mechanism.bound(rows, state)
                row[start : start + count] = bounded[
                    torch.arange(count), torch.arange(start, start + count)
                ].numpy()
        center, half = ends.sum(0) / 2, (ends[0] - ends[1]) / 2
        zero = mechanism.bound(torch.zeros(1, d, dtype=torch.float64), state)[0].numpy() - center
        return cls(center, half, zero)


def shaped(mechanism: Mechanism, states: Sequence[State]) -> bool:
    """Whether more than one number of the mechanism's state changes from round to round."""
    first, last = states[0], states[-1]
    changing = [
        name
        for name, tensor in first.items()
        if name in last and not torch.equal(tensor, last[name])
    ]
    return any(first[name].numel() > 1 for name in changing) or len(changing) > 1


def in_units(seen: Observation, mechanism: Mechanism, denominator: float) -> Floats:
    """Noise of a run in which all clients sent zero, in units of a row's reach: ``[rounds, d]``."""
    d = seen.moves.shape[1]
    if not shaped(mechanism, seen.states):
        norms = np.array([entry.clip_norm or 1.0 for entry in seen.entries], dtype=np.float64)
        norms = np.resize(norms, len(seen.moves)) if len(norms) else np.ones(len(seen.moves))
        return seen.moves / norms[:, None]
    units = np.empty_like(seen.moves)
    for row, move, state, count in zip(units, seen.moves, seen.states, seen.sizes, strict=True):
        scale = Scale.of(mechanism, state, d)
        row[:] = ((move - scale.center) * denominator - count * scale.zero) / scale.half
    return units


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
    mechanism : Mechanism
    denominator : float
    """

    stds: Floats
    values: int
    layers: int
    mechanism: Mechanism
    denominator: float

    @classmethod
    def of(
        cls, units: Floats, layers: Sequence[slice], mechanism: Mechanism, denominator: float
    ) -> MeasuredNoise:
        """From ``units [runs, rounds, d]``."""
        stds = np.empty(units.shape[-1])
        for part in layers:
            stds[part] = np.sqrt(np.square(units[..., part]).mean())
        width = min(part.stop - part.start for part in layers)
        values = width * units.shape[0] * units.shape[1]
        return cls(stds, values, len(layers), mechanism, denominator)

    def of_round(self, seen: Observation, index: int) -> Floats:
        """Standard deviation of a move in the round with this index, ``[d]``."""
        if not shaped(self.mechanism, seen.states):
            norm = seen.entries[index].clip_norm if index < len(seen.entries) else None
            return self.stds * (norm or 1.0)
        scale = Scale.of(self.mechanism, seen.states[index], len(self.stds))
        return self.stds * scale.half / self.denominator

"""The synthetic federation that a target is run on, and what a target gives back.

This file needs numpy alone, and is loaded by its path where fedsim is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
SHAPES: tuple[tuple[int, ...], ...] = ((4, 8), (16,), (2, 8))
"""Of the model's arrays: three, of unequal size."""


@dataclass(frozen=True)
class SyntheticFederation:
    """What a target is asked to release: so many rounds over clients whose updates are known.

    Attributes
    ----------
    rows : float64 ``[population, d]``
        The raw update of each client, or gradient of each example, the same in every round.
    examples : float64 ``[population]``
        How many examples each client says that it has.
    rounds : int
    seed : int
        Decides all draws of a target that can be seeded; others may ignore it.
    rate : float
        Expected share of the population in a round, as claimed.
    clip_norm, noise_multiplier : float
        As claimed; 0 where the claim does not say.
    shapes : sequence of tuple of int
        Of the model's arrays, which have ``d`` entries together.
    """

    rows: Floats
    examples: Floats
    rounds: int
    seed: int
    rate: float = 1.0
    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    shapes: Sequence[tuple[int, ...]] = SHAPES

    @property
    def population(self) -> int:
        """Number of clients, or of examples."""
        return len(self.rows)

    @property
    def initial(self) -> list[Floats]:
        """The model's arrays before the first round: zeros."""
        return [np.zeros(shape) for shape in self.shapes]

    def update(self, client: int) -> list[Floats]:
        """What a client would send, or what an example's gradient is, as the model's arrays."""
        return self.arrays(self.rows[client])

    def arrays(self, vector: Floats) -> list[Floats]:
        """A vector ``[d]`` as the model's arrays."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        pieces = np.split(np.asarray(vector, dtype=np.float64), ends[:-1])
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


@dataclass(frozen=True)
class TargetRelease:
    """What a target released.

    Attributes
    ----------
    models : float64 ``[rounds, d]``
        The model after each round.
    sampled : sequence of sequence of int, optional
        Who took part in each round, once for each time that it did; None where it is not seen.
    statistics : mapping of name to float64 ``[rounds]``
        Numbers that are released beside the model.
    """

    models: Floats
    sampled: Sequence[Sequence[int]] | None = None
    statistics: Mapping[str, Floats] = field(default_factory=dict)

    @classmethod
    def of(cls, result: Any, federation: SyntheticFederation) -> TargetRelease:
        """From what a target returned: this, a mapping of its attributes, or the models alone.

        Raises
        ------
        ValueError
            If it is not one model for each round.
        """
        if isinstance(result, Mapping):
            hooks = ("models", "sampled", "statistics")
            if "models" not in result or not set(result) <= set(hooks):
                known = ", ".join(hooks)
                raise ValueError(f"released {', '.join(map(repr, result))}; known: {known}.")
            result = cls(**result)
        if not isinstance(result, cls):
            result = cls(result)
        rounds, d = federation.rounds, federation.rows.shape[1]
        expected = f"it must be [{rounds}, {d}]: one after each round."
        try:
            vectors = [flat(model) for model in result.models]
        except (TypeError, ValueError) as error:
            raise ValueError(f"released no models ({error}); {expected}") from error
        lengths = {len(vector) for vector in vectors}
        if lengths != {d} or len(vectors) != rounds:
            shape = [len(vectors), *sorted(lengths)]
            raise ValueError(f"released models of shape {shape}; {expected}")
        models = np.array(vectors)
        numbers = {name: flat(values) for name, values in sorted(result.statistics.items())}
        for name, values in numbers.items():
            if len(values) != rounds:
                raise ValueError(f"released {len(values)} of {name!r}; there are {rounds} rounds.")
        sampled = result.sampled
        if sampled is not None:
            sampled = [[int(client) for client in of_round] for of_round in sampled]
            if len(sampled) != rounds:
                raise ValueError(f"sampled in {len(sampled)} rounds; there are {rounds}.")
        return cls(models, sampled, numbers)


def flat(arrays: Any) -> Floats:
    """A model's arrays, or one array, as a vector."""
    if isinstance(arrays, np.ndarray) and arrays.dtype != object:
        return arrays.astype(np.float64).ravel()
    return np.concatenate([np.asarray(array, dtype=np.float64).ravel() for array in arrays])

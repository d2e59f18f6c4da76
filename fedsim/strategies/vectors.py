"""The server's side of named vectors: what it sends beside the parameters, and makes of replies."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm, refuse_vectors
from fedsim.engines.arrays import array_record
from fedsim.rows.layout import Layout
from fedsim.rows.vectors import vectors_in, with_vectors

__all__ = ["NamedVectors"]


class NamedVectors:
    """Keeps what an algorithm's clients are sent beside the parameters; all zeros at first.

    Parameters
    ----------
    algorithm : LocalAlgorithm or None
        Says what clients send and what becomes of its mean; None, or one that sends its update
        alone, for nothing beside.
    population : int
    protects : bool
        Whether the run claims privacy, at whichever level.

    Attributes
    ----------
    values : Tensor ``[k]`` or None
        The vectors, one after another; None before the first round.

    Raises
    ------
    FedsimError
        If it claims privacy and clients would send vectors.
    """

    def __init__(self, algorithm: LocalAlgorithm | None, population: int, protects: bool) -> None:
        if algorithm is not None and protects:
            refuse_vectors(algorithm)
        self._algorithm = algorithm if algorithm is not None and algorithm.sends else None
        self._population = population
        self.values: Tensor | None = None

    def row_layout(self, parameters: Layout) -> Layout:
        """The layout of a row, from that of the parameters."""
        return with_vectors(parameters, self._algorithm.sends if self._algorithm else {})

    def extended(
        self, vector: Tensor, arrays: ArrayRecord, row: Layout
    ) -> tuple[Tensor, ArrayRecord]:
        """Parameters ``vector [p]`` and their arrays, with the vectors after them."""
        if self._algorithm is None:
            return vector, arrays
        if self.values is None:
            self.values = vector.new_zeros(row.d - len(vector))
        vector = torch.cat([vector, self.values.to(vector)])
        everything = ArrayRecord()
        for name, array in arrays.items():
            everything[name] = array
        beside = row.unflatten(vector)
        for name, array in array_record(
            {name: beside[name] for name in beside if name not in arrays}
        ).items():
            everything[name] = array
        return vector, everything

    def combine(self, mean: Tensor, sent: Tensor, row: Layout, usable: int) -> Tensor:
        """The update ``[p]`` in a mean row ``[d]``; the vectors become the next round's.

        Parameters
        ----------
        mean, sent : Tensor ``[d]``
            Mean of the rows, and what they had been sent.
        row : Layout
        usable : int
            Clients that it is the mean of.
        """
        if self._algorithm is None or self.values is None:
            return mean
        combined = self._algorithm.combine(
            mean[: row.d - len(self.values)],
            vectors_in(row, mean),
            vectors_in(row, sent.to(mean)),
            usable / self._population,
        )
        self.values = torch.cat([combined.vectors[name] for name in self._algorithm.sends])
        return combined.update

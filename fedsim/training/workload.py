"""How much each client does in a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy.plan import LocalWork
from fedsim.training.batches import Ints
from fedsim.training.data import ClientData

__all__ = ["Workload"]

Floats = npt.NDArray[np.float64]


@dataclass
class Workload:
    """The work of a trainer's clients, the same for all of them or each its own.

    Attributes
    ----------
    work : LocalWork
    data : ClientData
    counts : int64 ``[population]`` or None
        Each client's own number of epochs, or of steps, in the place of the work's.
    """

    work: LocalWork
    data: ClientData
    counts: Ints | None = None

    @classmethod
    def of(cls, work: LocalWork, data: ClientData, counts: Sequence[int] | Ints | None) -> Workload:
        """Of clients whose numbers are given, or of all alike.

        Raises
        ------
        FedsimError
            If there is not one number, at least 1, for each client.
        """
        if counts is None:
            return cls(work, data)
        if len(counts) != data.population or min(counts) < 1:
            raise FedsimError(
                f"client.work has {len(counts)} numbers, the least of them {min(counts)}; it must "
                f"have one, at least 1, for each of the {data.population} clients."
            )
        return cls(work, data, np.asarray(counts, dtype=np.int64))

    def counts_of(self, client_ids: Ints) -> Ints | None:
        """These clients' own numbers, ``[n]``."""
        return None if self.counts is None else self.counts[client_ids]

    def steps(self, client_ids: Ints) -> Floats:
        """Gradient evaluations of each client in a round, ``[n]``."""
        steps = [work.steps_of(size) for work, size in self._each_of(client_ids)]
        return np.array(steps, dtype=np.float64)

    def examples(self, client_ids: Ints) -> Floats:
        """How many examples each client goes through in a round, ``[n]``."""
        examples = [work.examples_of(size) for work, size in self._each_of(client_ids)]
        return np.array(examples, dtype=np.float64)

    def _each_of(self, client_ids: Ints) -> Iterator[tuple[LocalWork, int]]:
        """Each client's work, and how many examples it has."""
        for client in client_ids.tolist():
            work = self.work
            if self.counts is not None:
                work = work.counted(int(self.counts[client]))
            yield work, self.data.size(client)

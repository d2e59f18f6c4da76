"""What clients keep between rounds, while a round is under way: committed with their replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.rows.exchange import BlockTrainer, Ids
from fedsim.training.memory import Memory
from fedsim.training.trainer import Trainer

__all__ = ["Borrowed", "Transaction", "memory_of"]

Bools = npt.NDArray[np.bool_]
Arrays = dict[str, npt.NDArray[Any]]


def memory_of(trainer: BlockTrainer) -> Memory | None:
    """Where a trainer's clients keep their state; None if they keep none."""
    return trainer.memory if isinstance(trainer, Trainer) else None


class Transaction:
    """A memory whose changes can be taken back: a block that fails is run again from the start.

    Parameters
    ----------
    inner : Memory
    """

    def __init__(self, inner: Memory) -> None:
        self._inner = inner
        self._changes: list[tuple[Ids, int, dict[str, Tensor]]] = []

    def load(self, client_ids: Ids, round: int) -> tuple[Bools, dict[str, Tensor]]:
        """State as it was before anything that is not committed."""
        return self._inner.load(client_ids, round)

    def store(self, client_ids: Ids, round: int, state: Mapping[str, Tensor]) -> None:
        """Keep state once it is committed."""
        self._changes.append((client_ids, round, dict(state)))

    def commit(self) -> None:
        """Make the changes."""
        for change in self._changes:
            self._inner.store(*change)
        self._changes = []

    def discard(self) -> None:
        """Forget the changes."""
        self._changes = []


@dataclass
class Borrowed:
    """The state of some clients on its way to a worker process, and back.

    Attributes
    ----------
    client_ids : int64 ``[n]``
    present : bool ``[n]``
    rows : dict of str to ndarray ``[n, ...]``
        As a `Memory` loads them.
    stored : list
        What came to be kept, chunk by chunk.
    """

    client_ids: Ids
    present: Bools
    rows: Arrays
    stored: list[tuple[Ids, Arrays]] = field(default_factory=list)

    @classmethod
    def of(cls, memory: Memory, client_ids: Ids, round: int) -> Borrowed:
        """Take these clients' state along."""
        present, rows = memory.load(client_ids, round)
        return cls(client_ids, present, {k: v.cpu().numpy() for k, v in rows.items()})

    def load(self, client_ids: Ids, round: int) -> tuple[Bools, dict[str, Tensor]]:
        """See `Memory`."""
        del round  # it was asked for when the state was taken along
        position = {client: at for at, client in enumerate(self.client_ids.tolist())}
        at = np.array([position[client] for client in client_ids.tolist()], dtype=np.int64)
        return self.present[at], {k: torch.from_numpy(v[at]) for k, v in self.rows.items()}

    def store(self, client_ids: Ids, round: int, state: Mapping[str, Tensor]) -> None:
        """See `Memory`."""
        del round
        if state:
            kept = {name: rows.cpu().numpy() for name, rows in state.items()}
            self.stored.append((client_ids, kept))

    def give_back(self, memory: Memory, round: int) -> None:
        """Keep what was stored where it came from."""
        for client_ids, rows in self.stored:
            # Copies: what comes out of an object store is read-only.
            state = {name: torch.from_numpy(np.array(values)) for name, values in rows.items()}
            memory.store(np.array(client_ids), round, state)

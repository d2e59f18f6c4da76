"""What engines ask of whoever trains clients, and what clients keep between rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.rows.block import Block, Ids

CLIENT_IDS = "client_ids"

ClientStates = Mapping[str, Tensor]
"""`CLIENT_IDS`, int64 ``[m]``, and by name what these keep between rounds, ``[m, ...]``."""


@runtime_checkable
class BlockTrainer(Protocol):
    """A client algorithm with its clients' data, over blocks of clients: all that engines ask.

    `train` and `evaluate` yield blocks in the order of ``client_ids``, each no larger than memory
    or cache wants, and compute nothing before they are iterated. A client's part of a block
    depends on nobody else in it. Where a block raises, its clients are asked again one at a
    time: what a client keeps must change only once its block is done.

    A trainer of one's own needs `population`, `train` and `evaluate`, and inherits the rest from
    `TrainerDefaults`.
    """

    @property
    def population(self) -> int:
        """Number of clients; their ids are 0 .. population - 1."""

    @property
    def device(self) -> torch.device:
        """Where it trains."""

    def train(self, vector: Tensor, client_ids: Ids, round: int) -> Iterator[Block]:
        """Local work of these clients from the global parameters ``vector [d]``."""

    def evaluate(self, vector: Tensor, client_ids: Ids, round: int) -> Iterator[Block]:
        """Loss and accuracy of ``vector [d]`` on these clients' data."""

    def costs(self, client_ids: Ids) -> npt.NDArray[np.float64]:
        """Relative cost of each client's work, ``[n]``, above 0."""

    def receive(self, config: Mapping[str, object]) -> None:
        """Take what the config entries of a round's instructions say to all clients."""

    def state(self, client_ids: Ids | None = None, round: int | None = None) -> ClientStates:
        """What these clients keep between rounds, as of the start of ``round``.

        Without clients: all that must outlive the process, for a checkpoint.

        Returns
        -------
        mapping of str to Tensor ``[m, ...]``
            `CLIENT_IDS`, of those ``m`` that keep anything, and what they keep by name; empty if
            nobody does.
        """

    def keep(self, states: ClientStates, round: int) -> None:
        """Let these clients keep what `state` gave elsewhere, at the end of ``round``."""

    def restore(self, states: ClientStates) -> None:
        """Let clients keep what `state` gave, and nothing else."""

    def charge(self, vector: Tensor, client_ids: Ids, round: int) -> None:
        """Write down what these clients will release in a copy that trains them from ``vector``.

        Called before it does, each time that it does; `train` itself does the same.
        """

    def copy_for(self, device: str) -> BlockTrainer:
        """The same clients, to train on ``device`` in a process that is lent what they keep."""


class TrainerDefaults:
    """A `BlockTrainer` but for population, train and evaluate: on the CPU, keeping nothing."""

    device = torch.device("cpu")

    def costs(self, client_ids: Ids) -> npt.NDArray[np.float64]:
        """All the same."""
        return np.ones(len(client_ids))

    def receive(self, config: Mapping[str, object]) -> None:
        """Take nothing."""

    def state(self, client_ids: Ids | None = None, round: int | None = None) -> ClientStates:
        """Nothing is kept."""
        return {}

    def keep(self, states: ClientStates, round: int) -> None:
        """Nothing is kept."""

    def restore(self, states: ClientStates) -> None:
        """Nothing is kept."""

    def charge(self, vector: Tensor, client_ids: Ids, round: int) -> None:
        """Nothing is released under a client's own privacy."""

    def copy_for(self, device: str) -> Self:
        """The trainer itself, whatever the device."""
        return self

"""What clients keep between rounds, and where that lets them start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.rows.exchange import KEEP_SINCE
from fedsim.rows.trainers import ClientStates
from fedsim.training.batches import Ints
from fedsim.training.memory import Sent, StateKind, memory_for, packed, unpacked
from fedsim.training.personal import Personal

__all__ = ["Keeping", "Kept"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Kept:
    """What ``n`` clients have from earlier rounds.

    Attributes
    ----------
    present : bool ``[n]``
        Which of them have anything.
    rows : mapping of name to Tensor ``[n, ...]``
        It; rows of those that have nothing mean nothing.
    """

    present: Bools
    rows: Mapping[str, Tensor]

    def of(self, members: Ints) -> Kept:
        """What the clients at these positions have."""
        rows = {k: v[torch.from_numpy(members).to(v.device)] for k, v in self.rows.items()}
        return Kept(self.present[members], rows)


class Keeping:
    """State of a trainer's clients between rounds, and the parameters they keep to themselves.

    Parameters
    ----------
    state_kind : "reset", "client" or "server"
        As a trainer's ``state``.
    algorithm : LocalAlgorithm
    personal : Personal
    population : int
    directory : path, optional
        Where each client's own state is, in files.

    Attributes
    ----------
    memory : Memory
        Where clients have their state from.

    Raises
    ------
    FedsimError
        If clients would keep something, and ``state_kind`` does not let them.
    """

    def __init__(
        self,
        state_kind: StateKind,
        algorithm: LocalAlgorithm,
        personal: Personal,
        population: int,
        directory: Path | None = None,
    ) -> None:
        self.state_kind, self.algorithm, self.personal = state_kind, algorithm, personal
        if self.required and state_kind != "client":
            raise FedsimError(
                f"client.state is '{state_kind}'; it must be 'client' where clients keep "
                "parameters to themselves (model.personal, or an algorithm with a model or a "
                "control variate of its own)."
            )
        width = personal.packing.width
        self.memory = memory_for(state_kind, algorithm, population, width, directory)

    @property
    def required(self) -> bool:
        """Whether the run means nothing unless each client keeps its own state."""
        return bool(self.personal or self.algorithm.evaluates or self.algorithm.remembers)

    @property
    def carried(self) -> tuple[str, ...]:
        """Entries of the algorithm's state that outlive a round."""
        return () if self.state_kind == "reset" else self.algorithm.carried

    @property
    def by_clients(self) -> bool:
        """Whether each client keeps its own."""
        return self.state_kind == "client"

    def receive(self, config: Mapping[str, object]) -> None:
        """Take what the config entries of a round's instructions say of clients' state.

        Raises
        ------
        FedsimError
            If clients count on the server, and it keeps none.
        """
        if self.state_kind == "server":
            self.memory = Sent.of(config)
        else:
            self.memory.keep_since(config.get(KEEP_SINCE))

    def load(self, client_ids: Ints, round: int | None) -> Kept:
        """What these clients go into ``round`` with; without a round, what they have now."""
        return Kept(*self.memory.load(client_ids, round))

    def start(self, shared: Tensor, kept: Kept) -> Tensor:
        """Where ``n`` clients start from shared parameters ``[1 or n, D]``, packed ``[n, D]``."""
        start = self.personal.start(shared, kept.present, kept.rows)
        return start.expand(len(kept.present), -1)

    def evaluated(self, vector: Tensor, client_ids: Ints) -> Tensor:
        """With what these clients evaluate ``vector [d]``, packed ``[1 or n, D]``."""
        kept = self.load(client_ids, None)
        shared = self.personal.shared.pack(vector[None])
        theta = self.personal.start(shared, kept.present, kept.rows)
        if self.algorithm.evaluates in kept.rows:
            there = torch.from_numpy(kept.present).to(theta.device)[:, None]
            theta = torch.where(there, kept.rows[self.algorithm.evaluates].to(theta), theta)
        return theta

    def state(self, client_ids: Ints | None, round: int | None) -> ClientStates:
        """See `BlockTrainer`."""
        if client_ids is None:
            return self.memory.state()
        if not self.by_clients:
            return {}
        return packed(client_ids, *self.memory.load(client_ids, round))

    def keep(self, states: ClientStates, round: int) -> None:
        """See `BlockTrainer`."""
        client_ids, rows = unpacked(states)
        self.memory.store(client_ids, round, rows)

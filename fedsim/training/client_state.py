"""What clients keep between rounds: the algorithm's state, and parameters of their own.

A client trains all of its parameters, and sends the update of those that are shared (Arivazhagan
et al. 2019, "FedPer"). Its personal ones begin as the model's initial ones, are among what it keeps
between rounds, and are what it evaluates with. An algorithm may keep a whole model for that besides
(`LocalAlgorithm.evaluates`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.rows.block import ClientStates
from fedsim.rows.exchange import KEEP_SINCE
from fedsim.rows.layout import Layout
from fedsim.rows.packing import Packing
from fedsim.training.batches import Ints
from fedsim.training.state_stores import (
    CarriedState,
    ServerState,
    StateKind,
    state_store,
    unpacked,
)

PERSONAL = "personal"
"""Name of the personal parameters among what a client keeps."""


class PersistentState:
    """State of a trainer's clients between rounds, and the parameters they keep to themselves.

    Parameters
    ----------
    kind : "reset", "client" or "server"
        As a trainer's ``state``.
    algorithm : LocalAlgorithm
    personal : Personal
    population : int
    directory : path, optional
        Where each client's own state is, in files.

    Attributes
    ----------
    store : StateStore
        Where clients have their state from.

    Raises
    ------
    FedsimError
        If clients would keep something, and ``kind`` does not let them.
    """

    def __init__(
        self,
        kind: StateKind,
        algorithm: LocalAlgorithm,
        personal: Personal,
        population: int,
        directory: Path | None = None,
    ) -> None:
        self.kind, self.algorithm, self.personal = kind, algorithm, personal
        if self.required and kind != "client":
            raise FedsimError(
                f"client.state is '{kind}'; it must be 'client' where clients keep "
                "parameters to themselves (model.personal, or an algorithm with a model or a "
                "control variate of its own)."
            )
        self.store = state_store(kind, algorithm, population, personal.packing.width, directory)

    @property
    def required(self) -> bool:
        """Whether the run means nothing unless each client keeps its own state."""
        return bool(self.personal or self.algorithm.evaluates or self.algorithm.remembers)

    @property
    def entries(self) -> tuple[str, ...]:
        """Entries of the algorithm's state that outlive a round."""
        return () if self.kind == "reset" else self.algorithm.carried

    def receive(self, config: Mapping[str, object]) -> None:
        """Take what the config entries of a round's instructions say of clients' state.

        Raises
        ------
        FedsimError
            If clients count on the server, and it keeps none.
        """
        if self.kind == "server":
            self.store = ServerState.of(config)
        else:
            self.store.keep_since(config.get(KEEP_SINCE))

    def start(self, shared: Tensor, carried: CarriedState) -> Tensor:
        """Where ``n`` clients start from shared parameters ``[1 or n, D]``, packed ``[n, D]``."""
        return self.personal.start(shared, carried).expand(len(carried.present), -1)

    def evaluated(self, vector: Tensor, client_ids: Ints) -> Tensor:
        """With what these clients evaluate ``vector [d]``, packed ``[1 or n, D]``."""
        carried = self.store.load(client_ids, None)
        theta = self.personal.start(self.personal.shared.pack(vector[None]), carried)
        if self.algorithm.evaluates in carried.rows:
            present = torch.from_numpy(carried.present).to(theta.device)[:, None]
            theta = torch.where(present, carried.rows[self.algorithm.evaluates].to(theta), theta)
        return theta

    def state(self, client_ids: Ints | None, round: int | None) -> ClientStates:
        """What these clients keep, as of the start of a round; without clients, a checkpoint's."""
        if client_ids is None:
            return self.store.state()
        if self.kind != "client":
            return {}
        return self.store.load(client_ids, round).packed(client_ids)

    def keep(self, states: ClientStates, round: int) -> None:
        """Let these clients keep what `state` gave elsewhere, at the end of ``round``."""
        client_ids, rows = unpacked(states)
        self.store.store(client_ids, round, rows)


@dataclass(frozen=True)
class Personal:
    """Packed rows of all trained parameters, from what is sent and what clients keep.

    Attributes
    ----------
    packing : Packing
        Of all trained parameters.
    shared : Packing
        Of those that are sent, at their places in the same packed rows.
    initial : Tensor ``[D]``
        The model's own parameters, packed.
    inside : int64 Tensor ``[P]``
        Places of the personal ones in a packed row.
    """

    packing: Packing
    shared: Packing
    initial: Tensor
    inside: Tensor

    @classmethod
    def of(cls, model: nn.Module, names: Collection[str]) -> Self:
        """Of a model whose parameters of these names are personal.

        Raises
        ------
        FedsimError
            If no parameter is left to be shared.
        """
        trained = {
            n: p for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point()
        }
        shared = {n: p for n, p in trained.items() if n not in names}
        if trained and not shared:
            raise FedsimError(
                "model.personal leaves no trained parameter to be shared; it must leave one."
            )
        packing = Packing(Layout.of(trained))
        inside = _places(packing, names, next(model.parameters()).device)
        return cls(
            packing,
            Packing(Layout.of(shared), packing if len(inside) else None),
            packing.pack(packing.layout.flatten(trained).detach()[None])[0],
            inside,
        )

    def places(self, names: Collection[str]) -> Tensor:
        """Places of some parameters in a packed row, int64 ``[P]``."""
        return _places(self.packing, names, self.inside.device)

    @property
    def names(self) -> list[str]:
        """Of the personal parameters."""
        return [name for name in self.packing.slices if name not in self.shared.slices]

    def __bool__(self) -> bool:
        return len(self.inside) > 0

    def start(self, packed: Tensor, carried: CarriedState) -> Tensor:
        """Where ``n`` clients start: ``[1, D]`` where that is the same for all, or ``[n, D]``.

        ``packed [1 or n, D]`` is what was sent to them, and is not written to.
        """
        if not self:
            return packed
        packed = packed.repeat(len(carried.present) // len(packed), 1)
        packed[:, self.inside] = self.initial[self.inside]
        if PERSONAL in carried.rows:
            owners = torch.from_numpy(np.flatnonzero(carried.present)).to(packed.device)
            packed[owners[:, None], self.inside] = carried.rows[PERSONAL].to(packed)[owners]
        return packed

    @property
    def mask(self) -> Tensor:
        """1 at the places of the personal parameters, ``[D]``."""
        mask = torch.zeros_like(self.initial)
        mask[self.inside] = 1
        return mask

    def of_rows(self, theta: Tensor) -> dict[str, Tensor]:
        """What of ``theta [n, D]`` clients keep to themselves."""
        return {PERSONAL: theta[:, self.inside]} if self else {}


def _places(packing: Packing, names: Collection[str], device: torch.device) -> Tensor:
    ranges = [
        torch.arange(place.start, place.stop, device=device)
        for name, place in packing.slices.items()
        if name in names
    ]
    return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *ranges])

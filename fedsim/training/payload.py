"""Which of a client's parameters it sends, and how they are packed into a row.

A row is the update of the shared parameters, then the algorithm's named vectors. A client may keep
some parameters to itself (personal).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fedsim.arguments import as_text
from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.rows.layout import Layout, Width, vectors_in, with_vectors
from fedsim.rows.packing import Packing

PERSONAL = "personal"
"""Name of the personal parameters in the state that a client keeps."""


@dataclass(frozen=True)
class Personal:
    """Which trained parameters are sent (shared), and which are each client's own (personal).

    A client trains all of them, and sends the update of the shared ones (Arivazhagan et al. 2019,
    "FedPer"). Its personal parameters start at the model's initial values, are kept between rounds,
    and are used when it evaluates.

    Attributes
    ----------
    packing : Packing
        Packing of all trained parameters.
    shared : Packing
        Packing of the shared parameters, at their positions in the same packed rows.
    initial : Tensor ``[D]``
        The model's own parameters, packed.
    positions : int64 Tensor ``[P]``
        Positions of the personal parameters in a packed row.
    """

    packing: Packing
    shared: Packing
    initial: Tensor
    positions: Tensor

    @classmethod
    def from_model(cls, model: nn.Module, names: Collection[str]) -> Self:
        """Build it for a model, given the names of its personal parameters.

        Raises
        ------
        FedsimError
            If no parameter is shared, or the model has none of a given name.
        """
        known_names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        if unknown := [name for name in names if name not in known_names]:
            raise FedsimError(
                f"personal has {as_text(unknown[0])}; it must have names of the model's parameters."
            )
        trained = {
            n: p for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point()
        }
        shared = {n: p for n, p in trained.items() if n not in names}
        if trained and not shared:
            raise FedsimError(
                "model.personal leaves no trained parameter to be shared; it must leave one."
            )
        packing = Packing(Layout.of(trained))
        positions = positions_of(packing, names, next(model.parameters()).device)
        return cls(
            packing,
            Packing(Layout.of(shared), packing if len(positions) else None),
            packing.pack(packing.layout.flatten(trained).detach()[None])[0],
            positions,
        )

    @property
    def names(self) -> list[str]:
        """Names of the personal parameters, in the row's order."""
        return [name for name in self.packing.slices if name not in self.shared.slices]

    def __bool__(self) -> bool:
        return len(self.positions) > 0

    @property
    def mask(self) -> Tensor:
        """1 at the positions of the personal parameters, else 0, ``[D]``."""
        mask = torch.zeros_like(self.initial)
        mask[self.positions] = 1
        return mask


def positions_of(packing: Packing, names: Collection[str], device: torch.device) -> Tensor:
    """Positions of some parameters in a packed row, int64 ``[P]``."""
    ranges = [
        torch.arange(place.start, place.stop, device=device)
        for name, place in packing.slices.items()
        if name in names
    ]
    return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *ranges])


@dataclass(frozen=True)
class ReceivedVectors:
    """What clients are sent.

    Attributes
    ----------
    parameters : Tensor ``[1 or n, D]``
        The shared parameters, packed: one row for all clients, or each client's own.
    named : mapping of name to Tensor ``[1 or n, D]`` or ``[1 or n, 1]``
        The server's named vectors.
    """

    parameters: Tensor
    named: Mapping[str, Tensor]


@dataclass(frozen=True)
class Payload:
    """Converts packed parameters and vectors to rows ``[n, d]``, and back.

    Attributes
    ----------
    shared : Packing
        Packing of the parameters that are sent.
    layout, received_layout : Layout
        Layout of a row, and of what clients are sent, which may have more vectors at its end.
    receives : mapping of name to "model" or "number"
        Named vectors that clients are sent, with their widths.
    """

    shared: Packing
    layout: Layout
    received_layout: Layout
    receives: Mapping[str, Width]

    @classmethod
    def for_algorithm(cls, shared: Packing, algorithm: LocalAlgorithm) -> Self:
        """Build it for the named vectors that an algorithm sends and receives."""
        row = with_vectors(shared.layout, algorithm.sends)
        receives = algorithm.receives
        return cls(shared, row, with_vectors(shared.layout, receives), receives)

    def received(self, vectors: Tensor) -> ReceivedVectors:
        """Unpack what clients were sent, ``[1 or n, d]`` in the received layout."""
        named = {
            name: self.shared.pack(values) if self.receives[name] == "model" else values
            for name, values in vectors_in(self.received_layout, vectors).items()
        }
        return ReceivedVectors(self.shared.pack(vectors[:, : self.shared.layout.d]), named)

    def replies(self, theta: Tensor, sent_vectors: Mapping[str, Tensor], vectors: Tensor) -> Tensor:
        """Replies ``[n, d]`` of ``n`` clients that were sent ``vectors [1 or n, d]``.

        A named vector in a reply is the one that was received plus the one that is sent.
        """
        parameters = self.shared.unpack(theta)
        if not sent_vectors:
            return parameters
        received = vectors_in(self.layout, vectors)
        added = [values + self._row(name, sent_vectors[name]) for name, values in received.items()]
        return torch.cat([parameters, *added], dim=1)

    def rows(self, theta: Tensor, sent_vectors: Mapping[str, Tensor], vector: Tensor) -> Tensor:
        """`replies` minus ``vector [d]``: the same bytes as a server computes from replies.

        The rows may be written into the memory of ``theta``.
        """
        parameters, added = slice(self.shared.layout.d), slice(self.shared.layout.d, None)
        if not sent_vectors:
            return self.shared.difference_(theta, vector[parameters])
        vectors = self.replies(theta, sent_vectors, vector[None])[:, added] - vector[added]
        return torch.cat([self.shared.difference_(theta, vector[parameters]), vectors], dim=1)

    def _row(self, name: str, values: Tensor) -> Tensor:
        return self.shared.unpack(values) if self.receives[name] == "model" else values

"""A row as clients send it: the parameters that are shared, then the algorithm's named vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm
from fedsim.rows.layout import Layout
from fedsim.rows.packing import Packing
from fedsim.rows.vectors import Width, vectors_in, with_vectors

__all__ = ["Received", "Sending"]


@dataclass(frozen=True)
class Received:
    """What clients are sent.

    Attributes
    ----------
    vectors : Tensor ``[1 or n, d]``
        As it came: one row for all, or each client's own.
    parameters : Tensor ``[1 or n, D]``
        The shared parameters among it, packed.
    named : mapping of name to Tensor ``[1 or n, D]`` or ``[1 or n, 1]``
        The server's vectors.
    """

    vectors: Tensor
    parameters: Tensor
    named: Mapping[str, Tensor]


@dataclass(frozen=True)
class Sending:
    """Rows ``[n, d]`` from what clients end with, packed, and back.

    Attributes
    ----------
    shared : Packing
        Of the parameters that are sent.
    layout : Layout
        Of a row.
    sends : mapping of name to "model" or "number"
        The vectors.
    """

    shared: Packing
    layout: Layout
    sends: Mapping[str, Width]

    @classmethod
    def of(cls, shared: Packing, algorithm: LocalAlgorithm) -> Self:
        """What an algorithm's clients send."""
        return cls(shared, with_vectors(shared.layout, algorithm.sends), algorithm.sends)

    def received(self, vectors: Tensor) -> Received:
        """What came, ``[1 or n, d]``."""
        named = {
            name: self.shared.pack(values) if self.sends[name] == "model" else values
            for name, values in vectors_in(self.layout, vectors).items()
        }
        return Received(vectors, self.shared.pack(vectors[:, : self.shared.layout.d]), named)

    def ended(self, theta: Tensor, sent: Mapping[str, Tensor], vectors: Tensor) -> Tensor:
        """What ``n`` clients that came from ``vectors [1 or n, d]`` reply, ``[n, d]``.

        To what they received of the server's vectors they add what they send.
        """
        parameters = self.shared.unpack(theta)
        if not sent:
            return parameters
        received = vectors_in(self.layout, vectors)
        added = [values + self._row(name, sent[name]) for name, values in received.items()]
        return torch.cat([parameters, *added], dim=1)

    def rows(self, theta: Tensor, sent: Mapping[str, Tensor], vector: Tensor) -> Tensor:
        """`ended` less ``vector [d]``: the same bytes as whoever reads replies gets.

        They may lie where ``theta`` does, which is overwritten.
        """
        parameters, beside = slice(self.shared.layout.d), slice(self.shared.layout.d, None)
        if not sent:
            return self.shared.difference_(theta, vector)
        vectors = self.ended(theta, sent, vector[None])[:, beside] - vector[beside]
        return torch.cat([self.shared.difference_(theta, vector[parameters]), vectors], dim=1)

    def _row(self, name: str, values: Tensor) -> Tensor:
        return self.shared.unpack(values) if self.sends[name] == "model" else values

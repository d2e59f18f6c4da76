"""What of a client's parameters is sent, and the row in which it is sent.

A row is the update of the parameters that are shared, then the algorithm's named vectors; a client
may keep parameters to itself, and may compress what it sends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fedsim.arguments import shown
from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.rows.layout import Layout, Width, vectors_in, with_vectors
from fedsim.rows.packing import Packing

PERSONAL = "personal"
"""Name of the personal parameters among what a client keeps."""


@dataclass(frozen=True)
class Personal:
    """Which of a model's trained parameters are sent, and which are each client's own.

    A client trains all of them, and sends the update of those that are shared (Arivazhagan et al.
    2019, "FedPer"). Its personal ones begin as the model's initial ones, are among what it keeps
    between rounds, and are what it evaluates with.

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
            If no parameter is left to be shared, or one is not the model's.
        """
        known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        if unknown := [name for name in names if name not in known]:
            raise FedsimError(
                f"personal has {shown(unknown[0])}; it must have names of the model's parameters."
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
class Payload:
    """Rows ``[n, d]`` from what clients end with, packed, and back.

    Attributes
    ----------
    shared : Packing
        Of the parameters that are sent.
    layout, received_layout : Layout
        Of a row, and of what clients are sent, which may have more vectors at its end.
    receives : mapping of name to "model" or "number"
        The vectors.
    """

    shared: Packing
    layout: Layout
    received_layout: Layout
    receives: Mapping[str, Width]

    @classmethod
    def of(cls, shared: Packing, algorithm: LocalAlgorithm) -> Self:
        """What an algorithm's clients send and are sent."""
        row = with_vectors(shared.layout, algorithm.sends)
        receives = algorithm.receives
        return cls(shared, row, with_vectors(shared.layout, receives), receives)

    def received(self, vectors: Tensor) -> Received:
        """What came, ``[1 or n, d]`` of the received layout."""
        named = {
            name: self.shared.pack(values) if self.receives[name] == "model" else values
            for name, values in vectors_in(self.received_layout, vectors).items()
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
        """`ended` less ``vector [d]``: the same bytes as a server gets from replies.

        They may lie in the memory of ``theta``, which is overwritten.
        """
        parameters, added = slice(self.shared.layout.d), slice(self.shared.layout.d, None)
        if not sent:
            return self.shared.difference_(theta, vector[parameters])
        vectors = self.ended(theta, sent, vector[None])[:, added] - vector[added]
        return torch.cat([self.shared.difference_(theta, vector[parameters]), vectors], dim=1)

    def _row(self, name: str, values: Tensor) -> Tensor:
        return self.shared.unpack(values) if self.receives[name] == "model" else values


LEFT_OUT = "compression.left-out"
"""Name of what a client has left out so far, ``[n, d]``, among what it keeps."""

INDEX_BYTES = 4


@dataclass(frozen=True)
class Compression:
    """What of an update is sent.

    With error feedback (Seide et al. 2014; Karimireddy et al. 2019) a client compresses its update
    plus what it has left out so far, and keeps the difference. What is compressed is what is sent,
    bounded and summed: a bound sees nothing else.

    Attributes
    ----------
    share : float
        Of the coordinates, the largest in absolute value, at least one; 1 for all of them.
    bits : int
        Of a coordinate: it is rounded to one of ``2^bits - 1`` multiples, from -m to m, of the
        largest absolute value over m. With 1 bit it is its sign times the mean absolute value. 0
        for as it is.
    """

    share: float = 1.0
    bits: int = 0

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """``top-k(0.01)`` or ``bits(8)``; None for an empty text.

        Raises
        ------
        FedsimError
        """
        written = re.fullmatch(r"(top-k|bits)\(([0-9.e-]{1,20})\)", text)
        if not text:
            return None
        try:
            method, amount = written.groups() if written else ("", "")
            if method == "top-k" and 0 < float(amount) <= 1:
                return cls(share=float(amount))
            if method == "bits" and 1 <= int(amount) <= 16:
                return cls(bits=int(amount))
        except ValueError:
            pass
        raise FedsimError(
            f"client.compression = '{text}'; it must be top-k(share) with a share above 0 and up "
            "to 1, bits(number) with a number from 1 to 16, or empty."
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """The rows ``[n, d]`` as they are sent, each by itself."""
        if self.bits == 0:
            largest = torch.topk(rows.abs(), self.coordinates(rows.shape[1]), dim=1).indices
            return torch.zeros_like(rows).scatter_(1, largest, rows.gather(1, largest))
        if self.bits == 1:
            return rows.sign() * rows.abs().mean(dim=1, keepdim=True)
        steps = 2 ** (self.bits - 1) - 1
        unit = rows.abs().amax(dim=1, keepdim=True) / steps
        return torch.where(unit > 0, (rows / unit).round() * unit, rows)

    def coordinates(self, d: int) -> int:
        """How many of ``d`` are sent."""
        return min(d, math.ceil(self.share * d))

    def bytes(self, d: int, itemsize: int) -> int:
        """What a row takes: values with their places, or so many bits each and their unit."""
        if self.bits:
            return math.ceil(d * self.bits / 8) + itemsize
        return self.coordinates(d) * (itemsize + INDEX_BYTES)

"""What of a model each client keeps to itself: parameters that are neither sent nor replaced.

A client trains all of its parameters, and sends the update of those that are shared (Arivazhagan
et al. 2019, "FedPer"). Its own begin as the model's initial ones, are among what it keeps between
rounds, and are what it evaluates with. An algorithm may keep a whole model for that besides
(`LocalAlgorithm.evaluates`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.errors import FedsimError
from fedsim.rows.layout import Layout
from fedsim.rows.packing import Packing

__all__ = ["PERSONAL", "Personal"]

PERSONAL = "personal"
"""Name of these parameters among what a client keeps."""

Bools = npt.NDArray[np.bool_]


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
        device = next(model.parameters()).device
        inside = _places(packing, names, device)
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

    def start(self, packed: Tensor, present: Bools, kept: Mapping[str, Tensor]) -> Tensor:
        """Where ``n`` clients start: ``[1, D]`` where that is the same for all, or ``[n, D]``.

        Parameters
        ----------
        packed : Tensor ``[1, D]`` or ``[n, D]``
            What was sent to them; it is theirs to start from, and not to be written to.
        present : bool ``[n]``
            Who has kept something.
        kept : mapping of name to Tensor ``[n, ...]``
        """
        if not self:
            return packed
        packed = packed.repeat(len(present) // len(packed), 1)
        packed[:, self.inside] = self.initial[self.inside]
        if PERSONAL in kept:
            there = torch.from_numpy(np.flatnonzero(present)).to(packed.device)
            packed[there[:, None], self.inside] = kept[PERSONAL].to(packed)[there]
        return packed

    @property
    def mask(self) -> Tensor:
        """1 at the places of the personal parameters, ``[D]``."""
        mask = torch.zeros_like(self.initial)
        mask[self.inside] = 1
        return mask

    def kept(self, theta: Tensor) -> dict[str, Tensor]:
        """What clients that end at ``theta [n, D]`` keep."""
        return {PERSONAL: theta[:, self.inside]} if self else {}


def _places(packing: Packing, names: Collection[str], device: torch.device) -> Tensor:
    ranges = [
        torch.arange(place.start, place.stop, device=device)
        for name, place in packing.slices.items()
        if name in names
    ]
    return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *ranges])

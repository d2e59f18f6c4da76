"""Shorter updates, and what they leave out kept for the next round.

With error feedback (Seide et al. 2014; Karimireddy et al. 2019) a client compresses its update plus
what it has left out so far, and keeps the difference. What is compressed is what is sent, bounded
and summed: a bound sees nothing else.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedsim.errors import FedsimError

__all__ = ["LEFT_OUT", "Compression"]

LEFT_OUT = "compression.left-out"
"""Name of what a client has left out so far, ``[n, d]``, among what it keeps."""

INDEX_BYTES = 4


@dataclass(frozen=True)
class Compression:
    """What of an update is sent.

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
            way, amount = written.groups() if written else ("", "")
            if way == "top-k" and 0 < float(amount) <= 1:
                return cls(share=float(amount))
            if way == "bits" and 1 <= int(amount) <= 16:
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
            kept = torch.topk(rows.abs(), self.coordinates(rows.shape[1]), dim=1).indices
            return torch.zeros_like(rows).scatter_(1, kept, rows.gather(1, kept))
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

"""Random draws as a function of their address (seed, purpose, round, client).

Philox is counter-based: a generator is a point in a space of 2^256 counters under a 2^128
key, so a draw needs no state that a resumed run, another worker or another block size
would have to reproduce. Nothing in fedsim draws from a global generator.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np

__all__ = ["Purpose", "Randomness"]


class Purpose(IntEnum):
    """What a draw is for; two purposes never share a stream."""

    INIT = 1
    PARTITION = 2
    COHORT = 3
    BATCH = 4
    NOISE = 5
    CLIENT_NOISE = 6
    DROPOUT = 7
    EVALUATE = 8
    AUDIT = 9


@dataclass(frozen=True)
class Randomness:
    """Where a run's draws come from.

    Parameters
    ----------
    seed : int or None
        Between 0 and 2^63 - 1: every draw is a function of it. None: every generator is
        seeded anew from the operating system, and no draw can be repeated.
    """

    seed: int | None

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must lie in [0, 2^63).")

    @property
    def entropy(self) -> Literal["config", "system"]:
        """What the ledger calls this source."""
        return "system" if self.seed is None else "config"

    def generator(
        self, purpose: Purpose, round: int = 0, client: int = 0, part: int = 0
    ) -> np.random.Generator:
        """Generator of the draws at this address.

        ``part`` separates draws of one purpose, round and client (an epoch, a scalar).
        """
        if self.seed is None:
            return np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        return np.random.Generator(
            np.random.Philox(key=[self.seed, int(purpose)], counter=[0, part, round, client])
        )

    def torch_seed(self, purpose: Purpose, round: int = 0, client: int = 0, part: int = 0) -> int:
        """63-bit seed for a `torch.Generator` at this address."""
        return int(self.generator(purpose, round, client, part).integers(2**63))

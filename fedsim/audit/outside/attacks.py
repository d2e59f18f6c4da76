"""Attacks on a target: federations in which one row shows most."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedsim.audit.checks import Floats
from fedsim.audit.outside.claims import TargetClaim
from fedsim.audit.outside.federation import SHAPES, LittleFederation, TargetRelease

LONG = 1e3
"""Length of a row that every bound shortens, in C."""
FAINT = 1e-6
"""Length in C of a row that adds nothing, to a target that fails where it is zero."""
MANY = 1e3
"""Examples that a client says to have, where others have one."""

TOO_LITTLE = "noise is too small, or more is sampled"
LONG_ROWS = "rows longer than C pass"
EACH_ARRAY = "each array is clipped by itself"
COUNTED = "the denominator is counted"
SUM_CLIPPED = "the sum is clipped, and not each row"
ANOTHER_C = "rows are clipped to another C than noise has"

Target = Callable[[LittleFederation], TargetRelease]


def along(index: int) -> Floats:
    """The unit vector along a coordinate."""
    row = np.zeros(width())
    row[index] = 1.0
    return row


def width() -> int:
    """Number of the model's entries."""
    return sum(math.prod(shape) for shape in SHAPES)


def spread() -> Floats:
    """The unit vector that has the same length in every array."""
    arrays = [np.full(math.prod(shape), math.prod(shape) ** -0.5) for shape in SHAPES]
    return np.concatenate(arrays) / math.sqrt(len(SHAPES))


@dataclass(frozen=True)
class Attack:
    """A federation, and one client of it that is in it or not.

    Attributes
    ----------
    name : str
    direction : float64 ``[d]``
        A unit vector, along which the canary's row lies, and all others.
    others, canary : float
        Length of the rows of all other clients and of the canary, in C.
    examples : float
        How many the canary says to have; others have one.
    cause : str
        What it most likely means that a target withstands the attacks before it, but not this.
    silence : float
        Length of a row that adds nothing, in C.
    beside : float64 ``[d]``, optional
        A unit vector at a right angle, along which others' rows lie, every second one backwards.
    """

    name: str
    direction: Floats
    others: float
    canary: float
    cause: str
    examples: float = 1.0
    silence: float = 0.0
    beside: Floats | None = None

    def federation(self, claim: TargetClaim, present: bool, seed: int) -> LittleFederation:
        """The federation with the canary, or its neighbour without."""
        n, c = claim.population, claim.clip_norm
        lengths, examples = np.full(n, self.others), np.ones(n)
        lengths[-1], examples[-1] = self.canary, self.examples
        if not present and claim.adjacency == "replace-one":
            lengths[-1], examples[-1] = -self.canary, 1.0
        elif not present and claim.adjacency == "zero-out":
            lengths[-1], examples[-1] = 0.0, 1.0
        lengths = c * np.where(lengths == 0, self.silence, lengths)
        rows = lengths[:, None] * self.direction
        if self.beside is not None:
            signs = np.where(np.arange(n - 1) % 2, -1.0, 1.0)
            rows[:-1] = (signs * lengths[:-1])[:, None] * self.beside
        kept = n - (not present and claim.adjacency == "add-remove")
        return LittleFederation(
            rows=rows[:kept],
            examples=examples[:kept],
            rounds=claim.rounds,
            seed=seed,
            rate=claim.rate,
            clip_norm=claim.clip_norm,
            noise_multiplier=claim.noise_multiplier or 0.0,
        )


ATTACKS = (
    Attack("a row of length C", along(0), 0.0, 1.0, TOO_LITTLE),
    Attack("a longer row", along(40), 0.0, LONG, LONG_ROWS),
    Attack("a longer row in all arrays", spread(), 0.0, LONG, EACH_ARRAY),
    Attack("a row of zeros among others", along(1), 1.0, 0.0, COUNTED),
    Attack("a row against all others", along(2), 1.0, -1.0, COUNTED),
    Attack("a longer row against all others", along(6), 1.0, -LONG, SUM_CLIPPED),
    Attack(
        "a row of many examples", along(3), 0.0, 1.0,
        "rows are weighted by numbers that clients report", examples=MANY,
    ),
)  # fmt: skip


OF_ADAPTIVE = (
    *(attack for attack in ATTACKS if not attack.others),
    Attack("a row among long rows", along(4), LONG, LONG, ANOTHER_C, beside=along(5)),
)
"""Of clip norms that follow the rows, which rise or fall here in every round.

One row more moves such a C, as is charged, and with it all that others add: they add nothing.
"""

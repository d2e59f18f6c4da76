"""Attacks on a target: federations in which one row shows most."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedsim.audit.checks import Floats
from fedsim.audit.outside.claims import TargetClaim
from fedsim.audit.outside.federation import SHAPES, SyntheticFederation, TargetRelease

LONG_NORM = 1e3
"""Length of a row that every bound shortens, in C."""
NEARLY_ZERO_NORM = 1e-6
"""Length in C of a row that adds nothing, to a target that fails where it is zero."""
MANY_EXAMPLES = 1e3
"""Examples that a client says to have, where others have one."""

TOO_LITTLE_NOISE = "noise is too small, or more is sampled"
UNCLIPPED_ROWS = "rows longer than C pass"
CLIPPED_ARRAYS = "each array is clipped by itself"
COUNTED_DENOMINATOR = "the denominator is counted"
CLIPPED_SUM = "the sum is clipped, and not each row"
OTHER_CLIP_NORM = "rows are clipped to another C than noise has"

Target = Callable[[SyntheticFederation], TargetRelease]


def unit_vector(index: int) -> Floats:
    """The unit vector along a coordinate."""
    row = np.zeros(width())
    row[index] = 1.0
    return row


def width() -> int:
    """Number of the model's entries."""
    return sum(math.prod(shape) for shape in SHAPES)


def even_unit_vector() -> Floats:
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
    other_norm, canary_norm : float
        Length of the rows of all other clients and of the canary, in C.
    examples : float
        How many the canary says to have; others have one.
    cause : str
        What it most likely means that a target withstands the attacks before it, but not this.
    zero_norm : float
        Length of a row that adds nothing, in C.
    other_direction : float64 ``[d]``, optional
        A unit vector at a right angle, along which others' rows lie, every second one backwards.
    """

    name: str
    direction: Floats
    other_norm: float
    canary_norm: float
    cause: str
    examples: float = 1.0
    zero_norm: float = 0.0
    other_direction: Floats | None = None

    def federation(self, claim: TargetClaim, present: bool, seed: int) -> SyntheticFederation:
        """The federation with the canary, or its neighbour without."""
        n, c = claim.population, claim.clip_norm
        lengths, examples = np.full(n, self.other_norm), np.ones(n)
        lengths[-1], examples[-1] = self.canary_norm, self.examples
        if not present and claim.adjacency == "replace-one":
            lengths[-1], examples[-1] = -self.canary_norm, 1.0
        elif not present and claim.adjacency == "zero-out":
            lengths[-1], examples[-1] = 0.0, 1.0
        lengths = c * np.where(lengths == 0, self.zero_norm, lengths)
        rows = lengths[:, None] * self.direction
        if self.other_direction is not None:
            signs = np.where(np.arange(n - 1) % 2, -1.0, 1.0)
            rows[:-1] = (signs * lengths[:-1])[:, None] * self.other_direction
        count = n - (not present and claim.adjacency == "add-remove")
        return SyntheticFederation(
            rows=rows[:count],
            examples=examples[:count],
            rounds=claim.rounds,
            seed=seed,
            rate=claim.rate,
            clip_norm=claim.clip_norm,
            noise_multiplier=claim.noise_multiplier or 0.0,
        )


ATTACKS = (
    Attack("a row of length C", unit_vector(0), 0.0, 1.0, TOO_LITTLE_NOISE),
    Attack("a longer row", unit_vector(40), 0.0, LONG_NORM, UNCLIPPED_ROWS),
    Attack("a longer row in all arrays", even_unit_vector(), 0.0, LONG_NORM, CLIPPED_ARRAYS),
    Attack("a row of zeros among others", unit_vector(1), 1.0, 0.0, COUNTED_DENOMINATOR),
    Attack("a row against all others", unit_vector(2), 1.0, -1.0, COUNTED_DENOMINATOR),
    Attack("a longer row against all others", unit_vector(6), 1.0, -LONG_NORM, CLIPPED_SUM),
    Attack(
        "a row of many examples", unit_vector(3), 0.0, 1.0,
        "rows are weighted by numbers that clients report", examples=MANY_EXAMPLES,
    ),
)  # fmt: skip


ADAPTIVE_ATTACKS = (
    *(attack for attack in ATTACKS if not attack.other_norm),
    Attack(
        "a row among long rows",
        unit_vector(4),
        LONG_NORM,
        LONG_NORM,
        OTHER_CLIP_NORM,
        other_direction=unit_vector(5),
    ),
)
"""Of clip norms that follow the rows, which rise or fall here in every round.

One row more moves such a C, as is charged, and with it all that others add: they add nothing.
"""

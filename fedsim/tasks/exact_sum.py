"""Sums that no order of adding changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from fedsim.lazy import Tensor, torch

Floats = npt.NDArray[np.float64]

# Below every bit of a float64, denormal or not.
LEAST_BIT = 1200
HALF = 26


@dataclass(frozen=True)
class ExactSum:
    """A sum of float64 numbers that no order of adding changes.

    Attributes
    ----------
    units : int
        The sum in units of 2^-1200.
    count : int
        How many numbers.
    bad : int
        How many of them were not finite.
    """

    units: int = 0
    count: int = 0
    bad: int = 0

    @classmethod
    def of(cls, values: Tensor | Floats) -> Self:
        """Sum of all numbers of an array."""
        if isinstance(values, torch.Tensor):
            values = values.detach().double().numpy()
        flat = np.asarray(values, dtype=np.float64).ravel()
        finite = flat[np.isfinite(flat)]
        fraction, exponent = np.frexp(finite)
        digits = np.ldexp(fraction, 53).astype(np.int64)
        shifts, which = np.unique(exponent, return_inverse=True)
        # Halves of 26 bits: sums of 2^26 of them are whole numbers that float64 holds.
        low = np.bincount(which, weights=digits & (2**HALF - 1), minlength=len(shifts))
        high = np.bincount(which, weights=digits >> HALF, minlength=len(shifts))
        units = sum(
            ((int(h) << HALF) + int(lo)) << (int(shift) - 53 + LEAST_BIT)
            for shift, lo, h in zip(shifts, low, high, strict=True)
        )
        return cls(units, len(flat), len(flat) - len(finite))

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units, self.count + other.count, self.bad + other.bad)

    @property
    def mean(self) -> float:
        """The mean, rounded once; NaN over nothing, or where a number was not finite."""
        if self.bad or not self.count:
            return float("nan")
        return self.units / (self.count << LEAST_BIT)

"""Sums that have the same bytes in any order: integers held in float64.

Whole numbers below 2^53 add without rounding in float64, so a sum of them does not depend
on the order of the rows, on the block size or on the number of workers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms.noise import NoiseSource

__all__ = [
    "MAX_ROWS",
    "FreeSum",
    "GridSum",
    "add_rows_",
    "grid_unit",
    "grid_units",
    "more_rows",
    "truncate_",
]

GRID_BITS = 30
# Up to so many rows, adding one at a time is faster than a reduction over dimension 0.
FEW_ROWS = 4
MAX_ROWS = 2**22


def truncate_(y: Tensor, out: Tensor | None = None) -> Tensor:
    """Round ``y`` towards zero, in place or into ``out``."""
    out = y if out is None else out
    if y.is_cuda:
        return torch.trunc(y, out=out)
    # On CPU numpy's trunc is vectorised, and ten times as fast as torch's.
    np.trunc(y.numpy(), out=out.numpy())
    return out


def add_rows_(total: Tensor, y: Tensor) -> None:
    """Add rows ``y [..., c, d]`` to ``total [..., d]``."""
    if y.shape[-2] <= FEW_ROWS and not y.is_cuda:
        for row in y.unbind(-2):
            total += row
    else:
        total += y.sum(-2)


class _Scratch:
    """A buffer as large as the largest chunk so far: fresh pages cost more than the sums."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def like(self, y: Tensor) -> Tensor:
        """Uninitialised rows of ``y``'s shape."""
        if self._buffer is None or len(self._buffer) < len(y):
            self._buffer = torch.empty_like(y)
        return self._buffer[: len(y)]


def grid_unit(radius: float) -> float:
    """Unit of the grid for rows whose L2 norm is at most ``radius``."""
    return math.ldexp(1.0, math.frexp(radius)[1] - 1 - GRID_BITS)


def grid_units(radius: Tensor) -> Tensor:
    """`grid_unit` of each radius, without reading one: float64, same shape."""
    # A radius over its mantissa is a power of two, and comes out exact.
    return radius / torch.frexp(radius).mantissa * 2.0 ** -(GRID_BITS + 1)


def more_rows(rows: int, new: int) -> int:
    """Number of rows of a sum that gets ``new`` ones.

    Raises
    ------
    FedsimError
        Beyond 2^22, where the sum might no longer be exact.
    """
    if rows + new > MAX_ROWS:
        raise FedsimError(f"one sum has {rows + new} rows; it is exact up to {MAX_ROWS}.")
    return rows + new


class GridSum:
    """Exact sum of rows whose L2 norm is at most ``radius``.

    The grid's ``unit`` is a power of two between ``radius * 2^-31`` and ``radius * 2^-30``, so
    an entry is a whole number of at most 2^31 units and 2^22 rows stay below 2^53. Rows are
    rounded towards zero, which never makes one longer.

    Parameters
    ----------
    radius : float
        Positive.
    size : int
        Length of a row.
    fine : bool
        Also keep what truncation leaves, to another 30 bits (rows in float64). It is part of
        `value` but not of `noisy`: noise lives on the coarse grid.
    """

    def __init__(
        self,
        radius: float,
        size: int,
        *,
        fine: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.radius = radius
        self.unit = grid_unit(radius)
        self.rows = 0
        self._coarse = torch.zeros(size, dtype=torch.float64, device=device)
        self._fine = torch.zeros_like(self._coarse) if fine else None
        self._scratch = _Scratch()

    def add_(self, y: Tensor, *, rows: int | None = None) -> None:
        """Add rows ``y`` float64 ``[c, size]``, in units; ``y`` is overwritten.

        ``rows`` is the number of bounded rows in ``y`` where that is not c.

        Raises
        ------
        FedsimError
            Beyond 2^22 rows, where the sum might no longer be exact.
        """
        self.rows = more_rows(self.rows, len(y) if rows is None else rows)
        if self._fine is None:
            add_rows_(self._coarse, truncate_(y))
            return
        whole = truncate_(y, self._scratch.like(y))
        add_rows_(self._coarse, whole)
        add_rows_(self._fine, truncate_(y.sub_(whole).mul_(2.0**GRID_BITS)))

    def value(self) -> Tensor:
        """The sum, float64 ``[size]``."""
        if self._fine is None:
            return self._coarse * self.unit
        return (self._coarse + self._fine * 2.0**-GRID_BITS) * self.unit

    def noisy(self, std: float, noise: NoiseSource) -> Tensor:
        """The sum plus Gaussian noise of standard deviation ``std``, both on the grid.

        With ``std = 0`` this is `value`.
        """
        if std == 0:
            return self.value()
        drawn = torch.from_numpy(noise.integers(std / self.unit, len(self._coarse)))
        return (self._coarse + drawn.to(self._coarse.device)) * self.unit


class FreeSum:
    """Exact sum of weighted rows of no known bound, on two grids.

    Products ``weight * row`` are split into multiples of 2^-16 and of 2^-48. The sum is exact
    as long as there are at most 2^20 rows and the weighted norms add up to at most 2^36.
    """

    SCALE = 2.0**16
    _FINE = 2.0**32
    MAX_ROWS = 2**20
    MAX_TOTAL = 2.0**36

    def __init__(self, size: int, *, device: torch.device | str = "cpu") -> None:
        self.rows = 0
        self._coarse = torch.zeros(size, dtype=torch.float64, device=device)
        self._fine = torch.zeros_like(self._coarse)
        self._scratch = _Scratch()

    def add_(self, y: Tensor) -> None:
        """Add rows ``y`` float64 ``[c, size]``, weighted and times `SCALE`; overwritten.

        Raises
        ------
        FedsimError
            Beyond 2^20 rows.
        """
        self.rows += len(y)
        if self.rows > self.MAX_ROWS:
            raise FedsimError(f"one sum has {self.rows} rows; it is exact up to {self.MAX_ROWS}.")
        whole = truncate_(y, self._scratch.like(y))
        add_rows_(self._coarse, whole)
        add_rows_(self._fine, truncate_(y.sub_(whole).mul_(self._FINE)))

    def value(self) -> Tensor:
        """The sum, float64 ``[size]``."""
        return (self._coarse + self._fine / self._FINE) / self.SCALE

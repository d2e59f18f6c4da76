"""Sums that have the same bytes in any order: integers held in float64.

Whole numbers below 2^53 add without rounding in float64, so a sum of them does not depend
on the order of the rows, on the block size, on the number of workers or on the tree in
which their sums are merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np

from fedsim.errors import FedsimError
from fedsim.kernels.rows import add_rounded
from fedsim.lazy import Tensor, torch

# An entry of a row is at most 2^31 units, so that 2^22 rows stay below 2^53, up to which float64
# holds every whole number. More bits would allow fewer rows, fewer would round more coarsely:
# rounding towards zero changes a coordinate by at most 2^-30 C.
GRID_BITS = 30
MAX_ROWS = 2**22
# For rows of no known bound, times their weights: exact for 2^20 of them, of total norm 2^36.
FREE_UNIT, FREE_BITS, FREE_ROWS, FREE_TOTAL = 2.0**-16, 32, 2**20, 2.0**36
# The grid of a larger bound is coarse beside ordinary updates: without noise to hide that, what
# rounding drops is summed on a second grid.
LOOSE = 64.0
# Up to so many rows, adding one at a time is faster than a reduction over dimension 0.
FEW_ROWS = 4

Owners: TypeAlias = "slice | Tensor"
"""Some of n sums: a slice, or their numbers in int64."""

EVERYBODY = slice(None)

Rounding = Literal["all", "rows", "none"]
"""What is rounded as it comes: rows and sums of rows, rows only, nothing."""


def grid_units(radius: Tensor) -> Tensor:
    """Unit of the grid for rows whose L2 norm is at most each ``radius``: float64, same shape.

    A power of two between ``radius * 2^-31`` and ``radius * 2^-30``: an entry is a whole number
    of at most 2^31 units, and 2^22 rows stay below 2^53. No radius is read.
    """
    # A radius over its mantissa is a power of two, and comes out exact.
    return radius / torch.frexp(radius).mantissa * 2.0 ** -(GRID_BITS + 1)


def grid_unit(radius: float) -> float:
    """`grid_units` of a number."""
    return math.ldexp(1.0, math.frexp(radius)[1] - 1 - GRID_BITS)


class GridSum:
    """A sum of rows on a grid, ``[size]``, or those of n owners, ``[n, size]``.

    Rows are rounded towards zero to whole units, which never makes one longer: a bounded row stays
    within its bound, and the sensitivity is that of the bound, exactly.

    Parameters
    ----------
    radius : float64 Tensor ``[...]``
        L2 norm that no row exceeds; the shape says how many sums there are.
    size : int
        Length of a row.
    unit : float, optional
        Of the grid; otherwise `grid_units` of the radius.
    fine_bits : int
        Above 0, what rounding leaves is summed too, on a grid finer by so many bits.
    rounding : "all", "rows" or "none"
        "all" makes every merge exact. "rows" rounds the sums that `add_sum_` is given only
        once, in `on_grid`; "none" never rounds.
    """

    def __init__(
        self,
        radius: Tensor,
        size: int,
        *,
        unit: float | None = None,
        fine_bits: int = 0,
        rounding: Rounding = "all",
    ) -> None:
        self.radius = radius
        self.unit = grid_units(radius) if unit is None else torch.full_like(radius, unit)
        self.coarse = radius.new_zeros(*radius.shape, size)
        self.fine = torch.zeros_like(self.coarse) if fine_bits else None
        self._fine_scale = 2.0**fine_bits
        self._rounding = rounding
        self._scratch: Tensor | None = None

    @classmethod
    def bounded(
        cls, radius: Tensor, size: int, *, noisy: bool, exact: bool, double: bool
    ) -> GridSum:
        """For rows of at most this norm; what noise will hide is not summed.

        ``exact``: whether sums merge exactly. ``double``: whether rows are float64.
        """
        if not exact:
            return cls(radius, size, rounding="rows" if noisy else "none")
        fine = not noisy and (double or float(radius.max()) > LOOSE)
        return cls(radius, size, fine_bits=GRID_BITS if fine else 0)

    @classmethod
    def free(cls, like: Tensor, size: int) -> GridSum:
        """For weighted rows of no known bound; ``like [...]`` has the shape of a radius."""
        radius = torch.full_like(like, torch.inf)
        return cls(radius, size, unit=FREE_UNIT, fine_bits=FREE_BITS)

    @classmethod
    def scalar(cls, like: Tensor, half: float) -> GridSum:
        """For numbers that are at most ``half``; ``like [...]`` has the shape of a radius."""
        return cls(torch.full_like(like, half), 1, unit=grid_unit(half))

    @property
    def exact(self) -> bool:
        """Whether it merges exactly."""
        return self._rounding == "all"

    def add_(self, y: Tensor, owners: Owners = EVERYBODY) -> None:
        """Add rows ``y [..., c, size]`` of some owners, in units; ``y`` is overwritten."""
        if self.fine is not None:
            coarse = truncate_(y, self._room_for(y))
            _add_rows(self.coarse, coarse, owners)
            y = truncate_(y.sub_(coarse).mul_(self._fine_scale))
            _add_rows(self.fine, y, owners)
        else:
            _add_rows(self.coarse, y if self._rounding == "none" else truncate_(y), owners)

    def _room_for(self, y: Tensor) -> Tensor:
        """Uninitialised rows of ``y``'s shape, in a buffer as large as the largest ones so far.

        Allocating pages costs more than adding.
        """
        if self._scratch is None or self._scratch.numel() < y.numel():
            self._scratch = y.new_empty(y.numel())
        return self._scratch[: y.numel()].view(y.shape)

    def add_scaled_(self, rows: Tensor, factors: Tensor) -> None:
        """Add rows ``[c, size]`` times ``factors [c]`` to the one sum: the bytes of `add_`.

        They are rows that `fedsim.kernels.rows` takes.
        """
        add_rounded(rows, factors, self.coarse, self.fine, self._fine_scale)

    def add_sum_(self, total: Tensor, owners: Owners = EVERYBODY) -> None:
        """Add a sum of rows ``total [..., size]``, in units, not yet on the grid."""
        if self._rounding == "all":
            self.add_(total.unsqueeze(-2).clone(), owners)
        else:
            _add_rows(self.coarse, total.unsqueeze(-2), owners)

    def merge_(self, coarse: Tensor, fine: Tensor | None) -> None:
        """Add what another sum of the same unit holds."""
        self.coarse += coarse
        if self.fine is not None and fine is not None:
            self.fine += fine

    def on_grid(self) -> Tensor:
        """The sums on the grid, in units and without what is finer; not to be written to."""
        return truncate_(self.coarse) if self._rounding == "rows" else self.coarse

    def units(self) -> Tensor:
        """The sums in units, with what is finer than the grid: a copy."""
        if self.fine is None:
            return self.coarse.clone()
        return self.coarse + self.fine / self._fine_scale

    def value(self) -> Tensor:
        """The sums, float64 ``[..., size]``."""
        return self.units().mul_(self.unit[..., None])


class GridSums:
    """Sums by name over the same rows, and what became of the rows; they merge as one.

    What travels between processes is `state`: tensors as large as the sums, and counts.

    Parameters
    ----------
    grids : mapping of name to GridSum
    most : int
        Rows up to which the sums are exact.
    device : torch.device
    """

    def __init__(self, grids: Mapping[str, GridSum], most: int, device: torch.device) -> None:
        self.grids = grids
        self._rows, self._most = 0, most
        # Usable, rejected, clipped: on a GPU, until one is read.
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)

    @property
    def count(self) -> int:
        """Rows that the sums contain."""
        return int(self._counts[0])

    @property
    def rejected(self) -> int:
        """Rows that were not finite and contributed nothing."""
        return int(self._counts[1])

    @property
    def clipped(self) -> int:
        """Rows that were longer than a bound. The operator's: it is not noised."""
        return int(self._counts[2])

    def expect(self, rows: int) -> None:
        """Make room for so many rows more.

        Raises
        ------
        FedsimError
            If the sums might no longer be exact.
        """
        if self._rows + rows > self._most:
            raise FedsimError(
                f"one sum has {self._rows + rows} rows; it is exact up to {self._most}."
            )
        self._rows += rows

    def note(self, masks: RowMasks) -> None:
        """Count what became of rows."""
        usable = masks.usable
        noted = torch.stack((usable, masks.rejected, masks.clipped & usable))
        self._counts += noted.flatten(1).sum(1)

    def state(self) -> dict[str, Tensor]:
        """All that `merge` needs: sums in units (not copies), the units, and counts."""
        state = {"rows": torch.tensor(self._rows), "counts": self._counts.clone()}
        for name, grid in self.grids.items():
            state |= {f"{name}.unit": grid.unit, name: grid.coarse}
            if grid.fine is not None:
                state[f"{name}.fine"] = grid.fine
        return state

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add the `state` of other sums of the same round; exact in any order and tree.

        Raises
        ------
        FedsimError
            If they are of another bound, layout or round, or have too many rows.
        """
        mine = self.state()
        fits = mine.keys() == state.keys() and all(grid.exact for grid in self.grids.values())
        if not fits or any(
            mine[name].shape != tensor.shape
            or (name.endswith(".unit") and not torch.equal(mine[name], tensor.to(mine[name])))
            for name, tensor in state.items()
        ):
            raise FedsimError("a partial sum is of other bounds; only sums of one round merge.")
        self.expect(int(state["rows"]))
        self._counts += state["counts"].to(self._counts)
        for name, grid in self.grids.items():
            grid.merge_(state[name], state.get(f"{name}.fine"))


class RowMasks:
    """What became of each row: bool tensors of one shape."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.usable = torch.ones(shape, dtype=torch.bool, device=device)
        self.rejected = torch.zeros_like(self.usable)
        self.clipped = torch.zeros_like(self.usable)


def truncate_(y: Tensor, out: Tensor | None = None) -> Tensor:
    """Round ``y`` towards zero, in place or into ``out``."""
    out = y if out is None else out
    if y.is_cuda:
        return torch.trunc(y, out=out)
    # On CPU numpy's trunc is vectorised, and ten times as fast as torch's.
    np.trunc(y.numpy(), out=out.numpy())
    return out


def _add_rows(total: Tensor, y: Tensor, owners: Owners) -> None:
    """Add rows ``y [..., c, d]`` to these owners' ``total [..., d]``."""
    theirs = total if owners is EVERYBODY else total[owners]
    if y.shape[-2] <= FEW_ROWS and not y.is_cuda:
        for row in y.unbind(-2):
            theirs += row
    else:
        theirs += y.sum(-2)
    if torch.is_tensor(owners):  # indexing by a tensor copies, where a slice is a view
        total[owners] = theirs

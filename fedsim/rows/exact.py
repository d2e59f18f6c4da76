"""Exact sums, with the same bytes in any order: integers held in float64.

Integers below 2^53 add without rounding in float64. A sum of them does not depend on the order
of the rows, on the block size, on the number of workers, or on the tree in which partial sums are
merged. Rows are therefore rounded to integers, in units of a grid, before they are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np

from fedsim.errors import FedsimError
from fedsim.kernels.rows import add_rounded
from fedsim.lazy import Tensor, torch

# An entry of a row is at most 2^31 units, so that a sum of 2^22 rows stays within 2^53, up to which
# float64 has every integer. More bits would allow fewer rows; fewer would round more coarsely:
# rounding towards zero changes a coordinate by at most 2^-30 C.
GRID_BITS = 30
MAX_ROWS = 2**22
# Grid of weighted rows without a bound. It is exact for 2^20 rows whose norms add up to at most
# 2^36: 2^52 coarse units, and less than 2^52 fine ones.
UNBOUNDED_UNIT, UNBOUNDED_FINE_BITS, MAX_UNBOUNDED_ROWS, MAX_NORM_TOTAL = (
    2.0**-16,
    32,
    2**20,
    2.0**36,
)
# A bound above this has a grid that is coarse relative to ordinary updates. If no noise hides that,
# the remainders of the rounding are summed on a second, finer grid.
COARSE_RADIUS = 64.0
# Number of rows up to which adding one at a time is faster than a reduction over dimension 0.
FEW_ROWS = 4

Owners: TypeAlias = "slice | Tensor"
"""Indices of some of n sums: a slice, or an int64 tensor."""

ALL_OWNERS = slice(None)

Rounding = Literal["all", "rows", "none"]
"""What is rounded before it is added: rows and sums of rows, only rows, or nothing."""


def grid_units(radius: Tensor) -> Tensor:
    """Units of the grids for rows whose L2 norms are at most ``radius``: float64, same shape.

    A unit is a power of two between ``radius * 2^-31`` and ``radius * 2^-30``. An entry is then at
    most 2^31 units, and a sum of 2^22 rows at most 2^53. No radius is read back from a GPU.
    """
    # A number divided by its mantissa is a power of two, without a rounding error.
    return radius / torch.frexp(radius).mantissa * 2.0 ** -(GRID_BITS + 1)


def grid_unit(radius: float) -> float:
    """`grid_units` of a number."""
    return math.ldexp(1.0, math.frexp(radius)[1] - 1 - GRID_BITS)


class GridSum:
    """Sum of rows on a grid, ``[size]``, or n such sums of n owners, ``[n, size]``.

    Rows are rounded towards zero to whole units. This never makes a row longer, so that a bounded
    row stays within its bound, and the sensitivity is exactly that of the bound.

    Parameters
    ----------
    radius : float64 Tensor ``[...]``
        L2 norm that no row exceeds, for each sum: ``[]`` or ``[n]``.
    size : int
        Length of a row.
    unit : float, optional
        Unit of the grid; by default `grid_units` of the radius.
    fine_bits : int
        If above 0, the remainders of the rounding are summed too, on a grid finer by these bits.
    rounding : "all", "rows" or "none"
        "all" makes every merge exact. "rows" leaves sums that are passed to `add_sum_` unrounded
        until `on_grid`; "none" never rounds.
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
        """Build the sum for rows of at most this norm; a finer grid is omitted if noise hides it.

        ``exact``: whether sums merge exactly. ``double``: whether rows are float64.
        """
        if not exact:
            return cls(radius, size, rounding="rows" if noisy else "none")
        fine = not noisy and (double or float(radius.max()) > COARSE_RADIUS)
        return cls(radius, size, fine_bits=GRID_BITS if fine else 0)

    @classmethod
    def unbounded(cls, like: Tensor, size: int) -> GridSum:
        """Build the sum for weighted rows without a bound; ``like [...]`` has a radius's shape."""
        radius = torch.full_like(like, torch.inf)
        return cls(radius, size, unit=UNBOUNDED_UNIT, fine_bits=UNBOUNDED_FINE_BITS)

    @classmethod
    def scalar(cls, like: Tensor, half: float) -> GridSum:
        """Build the sum for numbers in +- ``half``; ``like [...]`` has the shape of a radius."""
        return cls(torch.full_like(like, half), 1, unit=grid_unit(half))

    @property
    def exact(self) -> bool:
        """Whether sums merge exactly."""
        return self._rounding == "all"

    def add_(self, y: Tensor, owners: Owners = ALL_OWNERS) -> None:
        """Add rows ``y [..., c, size]`` of some owners, in units; ``y`` is overwritten."""
        # Both the remainder and its product with a power of two are exact, so that the second
        # rounding is the only one in the fine sum.
        if self.fine is not None:
            coarse = truncate_(y, self._scratch_like(y))
            _add_rows(self.coarse, coarse, owners)
            y = truncate_(y.sub_(coarse).mul_(self._fine_scale))
            _add_rows(self.fine, y, owners)
        else:
            _add_rows(self.coarse, y if self._rounding == "none" else truncate_(y), owners)

    def _scratch_like(self, y: Tensor) -> Tensor:
        """Uninitialised tensor of ``y``'s shape, in a reused buffer.

        Allocating memory pages would take longer than the addition.
        """
        if self._scratch is None or self._scratch.numel() < y.numel():
            self._scratch = y.new_empty(y.numel())
        return self._scratch[: y.numel()].view(y.shape)

    def add_scaled_(self, rows: Tensor, factors: Tensor) -> None:
        """Add rows ``[c, size]`` times ``factors [c]`` to the one sum, with the bytes of `add_`.

        The rows must be of a kind that `fedsim.kernels.rows` supports.
        """
        add_rounded(rows, factors, self.coarse, self.fine, self._fine_scale)

    def add_sum_(self, total: Tensor, owners: Owners = ALL_OWNERS) -> None:
        """Add a sum of rows ``total [..., size]``, in units, that is not rounded yet."""
        if self._rounding == "all":
            self.add_(total.unsqueeze(-2).clone(), owners)
        else:
            _add_rows(self.coarse, total.unsqueeze(-2), owners)

    def merge_(self, coarse: Tensor, fine: Tensor | None) -> None:
        """Add the coarse and fine parts of another sum with the same unit."""
        self.coarse += coarse.to(self.coarse)
        if self.fine is not None and fine is not None:
            self.fine += fine.to(self.fine)

    def on_grid(self) -> Tensor:
        """The sums in whole units of the coarse grid: not a copy."""
        return truncate_(self.coarse) if self._rounding == "rows" else self.coarse

    def units(self) -> Tensor:
        """Copy of the sums in units, the fine part included."""
        if self.fine is None:
            return self.coarse.clone()
        return self.coarse + self.fine / self._fine_scale

    def value(self) -> Tensor:
        """The sums, float64 ``[..., size]``."""
        return self.units().mul_(self.unit[..., None])


class GridSums:
    """Several named sums over the same rows, with counts of the rows; they merge together.

    `state` is what is sent between processes: tensors as large as the sums, and counts.

    Parameters
    ----------
    grids : mapping of name to GridSum
    max_rows : int
        Largest number of rows for which the sums are exact.
    device : torch.device
    """

    def __init__(self, grids: Mapping[str, GridSum], max_rows: int, device: torch.device) -> None:
        self.grids = grids
        self._rows, self._max_rows = 0, max_rows
        # Usable, rejected, clipped. They stay on the device: reading one would wait for the GPU.
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)

    @property
    def count(self) -> int:
        """Number of rows in the sums."""
        return int(self._counts[0])

    @property
    def rejected(self) -> int:
        """Number of rows that were not finite, and so contributed nothing."""
        return int(self._counts[1])

    @property
    def clipped(self) -> int:
        """Number of rows that were longer than a bound; for the operator only, since un-noised."""
        return int(self._counts[2])

    def expect(self, rows: int) -> None:
        """Announce ``rows`` further rows.

        Raises
        ------
        FedsimError
            If the sums might no longer be exact.
        """
        if self._rows + rows > self._max_rows:
            raise FedsimError(
                f"one sum has {self._rows + rows} rows; it is exact up to {self._max_rows}."
            )
        self._rows += rows

    def count_rows(self, masks: RowMasks) -> None:
        """Add the masks of rows to the counts."""
        usable = masks.usable
        noted = torch.stack((usable, masks.rejected, masks.clipped & usable))
        self._counts += noted.flatten(1).sum(1)

    def count_row(self, *, usable: bool, clipped: bool) -> None:
        """Add one row, which was finite, to the counts."""
        if usable:
            self._counts[0] += 1
            self._counts[2] += int(clipped)

    def state(self) -> dict[str, Tensor]:
        """Input of `merge`: sums in units (not copies), the units, and counts."""
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
            If the bounds or layouts differ, as of another round, or there are too many rows.
        """
        own_state = GridSums.state(self)  # without what a subclass sends in addition
        fits = own_state.keys() == state.keys() and all(grid.exact for grid in self.grids.values())
        if not fits or any(
            own_state[name].shape != tensor.shape
            or (
                name.endswith(".unit")
                and not torch.equal(own_state[name], tensor.to(own_state[name]))
            )
            for name, tensor in state.items()
        ):
            raise FedsimError("a partial sum is of other bounds; only sums of one round merge.")
        self.expect(int(state["rows"]))
        self._counts += state["counts"].to(self._counts)
        for name, grid in self.grids.items():
            grid.merge_(state[name], state.get(f"{name}.fine"))


class RowMasks:
    """For each row: whether it is in the sum, was not finite, was clipped. Bool, one shape."""

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
    """Add rows ``y [..., c, d]`` to these owners' sums, ``total [..., d]``, in place."""
    owner_totals = total if owners is ALL_OWNERS else total[owners]
    if y.shape[-2] <= FEW_ROWS and not y.is_cuda:
        for row in y.unbind(-2):
            owner_totals += row
    else:
        owner_totals += y.sum(-2)
    if torch.is_tensor(owners):  # indexing by a tensor copies, where a slice is a view
        total[owners] = owner_totals

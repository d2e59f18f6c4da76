"""Base of bounds that multiply each row by a number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import Bound, Number, Shaped, State, per_row
from fedsim.rows.dense import Rows
from fedsim.rows.norms import norms_, norms_of, round_up, usual, whiten_

IMPLICIT_MARGIN = 2.0**-19
"""Relative margin on norms from factors, whose error is below 2^-20 (`MeasuredRows`)."""


class ScalingBound(Bound):
    """A bound that multiplies each row by the factor from `scales`, and does nothing else."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        methods = ("shape_", "scaled", "implicit")
        shape_depth, *depths = (
            [method in vars(base) for base in cls.__mro__].index(True) for method in methods
        )
        # A subclass may override `shape_`, to do more than multiply. The faster ways it inherits
        # only multiply and would bypass that: disable those defined further up than `shape_`.
        for method, depth in zip(methods[1:], depths, strict=True):
            if shape_depth < depth:
                setattr(cls, method, getattr(Bound, method))

    @abstractmethod
    def scales(self, norms: Tensor, ready: State, unit: Tensor | float) -> Tensor:
        """Factor of each row, from its norm; the caller lowers it if the row would leave the ball.

        Parameters
        ----------
        norms : Tensor ``[..., rows]``
            NaN (a non-finite row) gives NaN, and the row contributes zero.
        ready : State
            `Bound.ready`, for adaptive bounds.
        unit : Tensor or float
            Norms are in these units, and the factor is for rows in these units: extreme rows
            have been rescaled (`fedsim.rows.norms.norms_`).
        """

    def whitening(self, state: State) -> tuple[Tensor | None, Tensor | None]:
        """``(scale, center)``, each ``[..., d]`` or None: coordinates in which norms are taken.

        They are the arguments of `Rows.norms`.
        """
        return None, None

    def shape_(self, y: Tensor, ready: State) -> Shaped:
        """Factors of rows, in the coordinates of `whitening`."""
        whiten_(y, *self.whitening(ready))
        norms, unit = norms_(y)
        return self._shaped(norms, ready, y.shape[-1], unit)

    def scaled(self, rows: Tensor, ready: State) -> Shaped | None:
        """Factors of unchanged rows; None if rows are whitened, or their norms extreme."""
        if any(vector is not None for vector in self.whitening(ready)):
            return None
        norms = norms_of(rows)
        return self._shaped(norms, ready, rows.shape[1], 1.0) if usual(norms) else None

    def _shaped(self, norms: Tensor, ready: State, d: int, unit: Tensor | float) -> Shaped:
        limit, longest = per_row(self.radius(ready, d)), round_up(norms, d)
        # Even if `scales` is wrong, no row leaves the ball. NaN stays NaN.
        factor = torch.minimum(self.scales(longest, ready, unit), limit / longest)
        clipped = norms * unit > limit
        return Shaped(factor, clipped, self.sides_of(clipped))

    def implicit(
        self, rows: Rows, ready: State, unit: Number, weights: Tensor
    ) -> tuple[Shaped, Tensor] | None:
        """Factors from norms, and one weighted sum; few rows or none are materialised."""
        measured = rows.measure(*self.whitening(ready))
        if measured is None:
            return None
        # The margin covers the rounding of the formula for norms, and of the sum to the grid.
        limit, longest = per_row(self.radius(ready, 1)), measured.norms * (1 + IMPLICIT_MARGIN)
        factor = torch.minimum(self.scales(longest, ready, 1.0), limit / longest)
        clipped = measured.norms > limit
        weight = factor.nan_to_num(nan=0.0) / per_row(unit) * weights
        return Shaped(factor, clipped, self.sides_of(clipped)), measured.sum(weight)

    def sides_of(self, clipped: Tensor) -> Mapping[str, Tensor]:
        """The bound's scalars of rows; ``clipped``, bool ``[..., rows]``: longer than the bound."""
        return {}


def clip_factor(norms: Tensor, clip_norm: float | Tensor, unit: Tensor | float) -> Tensor:
    """``min(1, C / norm)`` for norms in ``unit``; ``clip_norm``: one number, or one per row."""
    # NaN stays NaN: neither division nor clamp hides it, as Python's min() would.
    return torch.clamp(clip_norm / norms, max=unit)

"""What bounds that multiply a row by a number have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import Bound, Number, Shaped, State, per_row
from fedsim.rows.dense import Rows
from fedsim.rows.norms import norms_, norms_of, round_up, usual, whiten_

IMPLICIT_MARGIN = 2.0**-19


class ScalingBound(Bound):
    """A bound whose bounded row is the row times what `scales` gives."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        methods = ("shape_", "scaled", "implicit")
        nearest, *others = (
            [method in vars(base) for base in cls.__mro__].index(True) for method in methods
        )
        # A subclass that overrides one way of bounding, to do more than multiply, must not be
        # bypassed by another way that it inherits and that only multiplies.
        for method, place in zip(methods[1:], others, strict=True):
            if nearest < place:
                setattr(cls, method, getattr(Bound, method))

    @abstractmethod
    def scales(self, norms: Tensor, ready: State, unit: Tensor | float) -> Tensor:
        """Factor of each row, from the norms alone; lowered where the row would leave the ball.

        Parameters
        ----------
        norms : Tensor ``[..., rows]``
            NaN (a non-finite row) gives NaN, and the row contributes zero.
        ready : State
            `Bound.ready`, where the bound adapts.
        unit : Tensor or float
            The norms are in these units and the factor is for rows in these units, as
            extreme rows are rescaled.
        """

    def whitening(self, state: State) -> tuple[Tensor | None, Tensor | None]:
        """``(scale, center)``, each ``[..., d]`` or None, of the norms that `scales` wants.

        They are the arguments of `Rows.norms`.
        """
        return None, None

    def shape_(self, y: Tensor, ready: State) -> Shaped:
        """Multiply, in the coordinates of `whitening`."""
        whiten_(y, *self.whitening(ready))
        norms, unit = norms_(y)
        return self._shaped(norms, ready, y.shape[-1], unit)

    def scaled(self, rows: Tensor, ready: State) -> Shaped | None:
        """Multiply; None where norms are of other coordinates, or extreme."""
        if any(vector is not None for vector in self.whitening(ready)):
            return None
        norms = norms_of(rows)
        return self._shaped(norms, ready, rows.shape[1], 1.0) if usual(norms) else None

    def _shaped(self, norms: Tensor, ready: State, d: int, unit: Tensor | float) -> Shaped:
        limit, longest = per_row(self.radius(ready, d)), round_up(norms, d)
        # Also if `scales` is wrong no row leaves the ball. NaN stays NaN.
        factor = torch.minimum(self.scales(longest, ready, unit), limit / longest)
        clipped = norms * unit > limit
        return Shaped(factor, clipped, self.sides_of(clipped))

    def implicit(
        self, rows: Rows, ready: State, unit: Number, weights: Tensor
    ) -> tuple[Shaped, Tensor] | None:
        """From norms and one weighted sum, without a row but those that are in doubt."""
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
        """Scalars of rows, of which bool ``clipped [..., rows]`` are longer than the bound."""
        return {}


def clip_factor(norms: Tensor, clip_norm: float | Tensor, unit: Tensor | float) -> Tensor:
    """``min(1, C / norm)`` in ``unit``; ``clip_norm`` a number, or a number a row."""
    # NaN stays NaN: neither division nor clamp hides it, as Python's min() would.
    return torch.clamp(clip_norm / norms, max=unit)

"""Base of mechanisms that multiply each row by a number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import BoundedRows, SimpleMechanism, State, per_row
from fedsim.rows.norms import norms_, round_up, whiten_


class ScalingMechanism(SimpleMechanism):
    """A mechanism that multiplies each row by the factor from `scales`, and does nothing else.

    Factored rows are therefore measured and summed by their factors, and dense rows are added
    without a copy.
    """

    @property
    def only_scales(self) -> bool:
        """Whether `factors` is all that happens to rows; not if a subclass has its own `bound_`."""
        return type(self).bound_ is ScalingMechanism.bound_

    @abstractmethod
    def scales(self, norms: Tensor, round_state: State, unit: Tensor | float) -> Tensor:
        """Factor of each row, from its norm; the caller lowers it if the row would leave the ball.

        Parameters
        ----------
        norms : Tensor ``[..., rows]``
            NaN (a non-finite row) gives NaN, and the row contributes zero.
        round_state : State
            `SimpleMechanism.round_state`, for adaptive mechanisms.
        unit : Tensor or float
            Norms are in these units, and the factor is for rows in these units: extreme rows
            have been rescaled (`fedsim.rows.norms.norms_`).
        """

    def whitening(self, state: State) -> tuple[Tensor | None, Tensor | None]:
        """``(scale, center)``, each ``[..., d]`` or None: coordinates in which norms are taken.

        They are the arguments of `Rows.norms`.
        """
        return None, None

    def bound_(self, y: Tensor, round_state: State) -> BoundedRows:
        """Factors of rows, in the coordinates of `whitening`."""
        whiten_(y, *self.whitening(round_state))
        norms, unit = norms_(y)
        return self.factors(norms, round_up(norms, y.shape[-1]), round_state, y.shape[-1], unit)

    def factors(
        self, norms: Tensor, longest: Tensor, round_state: State, d: int, unit: Tensor | float = 1.0
    ) -> BoundedRows:
        """Factors of rows of length ``d``, in the coordinates of `whitening`.

        Parameters
        ----------
        norms, longest : Tensor ``[..., rows]``
            Norms, and upper bounds on the true ones, in ``unit`` as in `scales`.
        """
        limit = per_row(self.radius(round_state, d))
        # Even if `scales` is wrong, no row leaves the ball. NaN stays NaN.
        factor = torch.minimum(self.scales(longest, round_state, unit), limit / longest)
        clipped = norms * unit > limit
        return BoundedRows(factor, clipped, self.row_scalars(clipped))

    def row_scalars(self, clipped: Tensor) -> Mapping[str, Tensor]:
        """Scalars of rows; ``clipped``, bool ``[..., rows]``: longer than the bound."""
        return {}


def clip_factor(norms: Tensor, clip_norm: float | Tensor, unit: Tensor | float) -> Tensor:
    """``min(1, C / norm)`` for norms in ``unit``; ``clip_norm``: one number, or one per row."""
    # NaN stays NaN: neither division nor clamp hides it, as Python's min() would.
    return torch.clamp(clip_norm / norms, max=unit)

"""Bounds that multiply each row by a number: their base, clipping and normalisation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.mechanisms.base import NORM, Bound, Shaped, State, per_row
from fedsim.registry import register
from fedsim.rows.norms import norms_, round_up, whiten_
from fedsim.settings import Interval


class ScalingBound(Bound):
    """A bound that multiplies each row by the factor from `scales`, and does nothing else.

    Factored rows are therefore measured and summed by their factors, and dense rows are added
    without a copy.
    """

    @property
    def only_scales(self) -> bool:
        """Whether `factors` is all that happens to rows; not if a subclass has its own `shape_`."""
        return type(self).shape_ is ScalingBound.shape_

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
        return self.factors(norms, round_up(norms, y.shape[-1]), ready, y.shape[-1], unit)

    def factors(
        self, norms: Tensor, longest: Tensor, ready: State, d: int, unit: Tensor | float = 1.0
    ) -> Shaped:
        """Factors of rows of length ``d``, in the coordinates of `whitening`.

        Parameters
        ----------
        norms, longest : Tensor ``[..., rows]``
            Norms, and upper bounds on the true ones, in ``unit`` as in `scales`.
        """
        limit = per_row(self.radius(ready, d))
        # Even if `scales` is wrong, no row leaves the ball. NaN stays NaN.
        factor = torch.minimum(self.scales(longest, ready, unit), limit / longest)
        clipped = norms * unit > limit
        return Shaped(factor, clipped, self.sides_of(clipped))

    def sides_of(self, clipped: Tensor) -> Mapping[str, Tensor]:
        """The bound's scalars of rows; ``clipped``, bool ``[..., rows]``: longer than the bound."""
        return {}


def clip_factor(norms: Tensor, clip_norm: float | Tensor, unit: Tensor | float) -> Tensor:
    """``min(1, C / norm)`` for norms in ``unit``; ``clip_norm``: one number, or one per row."""
    # NaN stays NaN: neither division nor clamp hides it, as Python's min() would.
    return torch.clamp(clip_norm / norms, max=unit)


@register("mechanism", "clipping")
@dataclass(frozen=True)
class Clipping(ScalingBound):
    """``u * min(1, C / ||u||)`` (Abadi et al. 2016; McMahan et al. 2018).

    Guarantee: the sum changes by at most C in L2 norm when a row is added or removed.

    Examples
    --------
    >>> import torch
    >>> Clipping(clip_norm=1.0).bound(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).norm(dim=1)
    tensor([1.0000, 0.5000])
    """

    clip_norm: Annotated[float, NORM] = 1.0
    """C: longer rows are scaled down to this L2 norm."""

    def scales(self, norms: Tensor, ready: State, unit: Tensor | float) -> Tensor:
        """``min(1, C / norm)``."""
        return clip_factor(norms, self.clip_norm, unit)

    def radius(self, ready: State, d: int) -> float:
        """C."""
        return self.clip_norm


@register("mechanism", "norm-bound")
@dataclass(frozen=True)
class NormBound(Clipping):
    """Rows whose norm is known never to exceed C (the "norm bound" of AdaCliP's tables).

    A row that does exceed C is clipped, so that the guarantee does not depend on the assumption;
    ``clipped`` of the sum counts such rows.
    """

    clip_norm: Annotated[float, NORM] = 1.0
    """C, such as 28 for softmax regression on 784 pixels in [0, 1]: no row is longer."""


@register("mechanism", "normalization")
@dataclass(frozen=True)
class Normalization(ScalingBound):
    """``C * u / (||u|| + smoothing)``, and 0 for u = 0 (Das et al. 2021).

    With ``smoothing > 0`` this is the smooth form of AUTO-S (Bu et al. 2023) and alpha-NormEC.
    Without it, even a row of rounding errors is scaled to norm C.

    Guarantee: the sum changes by at most C in L2 norm when a row is added or removed. By how much
    does not depend on the row's length.
    """

    clip_norm: Annotated[float, NORM] = 1.0
    """C, the L2 norm to which every row is scaled."""
    smoothing: Annotated[float, Interval(ge=0.0, le=1e30)] = 0.0
    """kappa, added to a row's norm before dividing by it: rows much shorter than this stay
    short."""

    def scales(self, norms: Tensor, ready: State, unit: Tensor | float) -> Tensor:
        """``C / (norm + smoothing)``, or 0 for a norm of 0."""
        smooth = norms if self.smoothing == 0 else norms + self.smoothing / unit
        return torch.where(norms == 0, 0.0, self.clip_norm / smooth)

    def radius(self, ready: State, d: int) -> float:
        """C."""
        return self.clip_norm

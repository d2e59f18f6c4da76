"""Clipping: rows longer than a norm are scaled down to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor
from fedsim.mechanisms.base import NORM, State
from fedsim.mechanisms.scaling import ScalingMechanism, clip_factor
from fedsim.registry import register


@register("mechanism", "clipping")
@dataclass(frozen=True)
class Clipping(ScalingMechanism):
    """``u * min(1, C / ||u||)`` (Abadi et al. 2016; McMahan et al. 2018).

    Guarantee: the sum changes by at most C in L2 norm when a row is added or removed, for any row::

        norm 0                        the row, 0
        norm at most C                the row
        norm above C, however large   C in norm, in the row's direction
        an entry NaN or infinite      0
        C = 0, C = inf                refused: C is from 1e-30 to 1e9

    Examples
    --------
    >>> import torch
    >>> Clipping(clip_norm=1.0).bound(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).norm(dim=1)
    tensor([1.0000, 0.5000])
    """

    clip_norm: Annotated[float, NORM] = 1.0
    """C: longer rows are scaled down to this L2 norm."""

    def scales(self, norms: Tensor, round_state: State, unit: Tensor | float) -> Tensor:
        """``min(1, C / norm)``."""
        return clip_factor(norms, self.clip_norm, unit)

    def radius(self, round_state: State, d: int) -> float:
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

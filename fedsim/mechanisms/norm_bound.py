"""A bound of the norm that is known to hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.mechanisms.base import NORM
from fedsim.mechanisms.clipping import Clipping
from fedsim.registry import register
from fedsim.settings import Doc


@register("mechanism", "norm-bound")
@dataclass(frozen=True)
class NormBound(Clipping):
    """Rows whose norm is known never to exceed C (the "norm bound" of AdaCliP's tables).

    A row that does exceed it is clipped all the same, so that the guarantee does not rest on
    the claim; the sum's ``clipped`` says how many did.
    """

    clip_norm: Annotated[
        float,
        *NORM,
        Doc("C, such as 28 for softmax regression on 784 pixels in [0, 1]: no row is longer."),
    ] = 1.0

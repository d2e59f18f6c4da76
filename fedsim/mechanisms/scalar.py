"""A private mean of one number a row (its loss, its accuracy), released with the vector."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from fedsim.errors import FedsimError
from fedsim.mechanisms.base import (
    NORM,
    Guarantee,
    Mechanism,
    Scalar,
    Segment,
    Side,
    require_mechanism,
)
from fedsim.rows.layout import Layout
from fedsim.settings import Doc, Ge, Lt


@dataclass(frozen=True)
class PrivateScalar(Mechanism):
    """Another mechanism, and beside its vector a noisy mean of one scalar.

    The scalar is clamped to ``[0, high]`` and centred, so that a row that joins moves its sum
    by ``high / 2`` at most: ``mean = high / 2 + (sum of (x - high / 2) + noise) / r``.

    Guarantee: that of the mechanism inside, at the whole multiplier z: of ``1 / z^2`` the
    scalar takes ``fraction`` and leaves the rest; its noise multiplier is ``z / sqrt(fraction)``.
    """

    mechanism: Annotated[Mechanism, Doc("The one inside.")]
    name: Annotated[str, Doc("Of the scalar, in `PartialSum.add` and `Release.sides`.")] = "loss"
    high: Annotated[float, *NORM, Doc("The largest value.")] = 1.0
    fraction: Annotated[
        float, Ge(0), Lt(1), Doc("0 is infinite noise: the scalar is not released.")
    ] = 0.1

    def __post_init__(self) -> None:
        require_mechanism(self.mechanism, "PrivateScalar")
        super().__post_init__()
        if self.name in self.mechanism.side_names:
            raise FedsimError(f"name is '{self.name}'; the mechanism inside has such a scalar.")
        if self.mechanism.weighting != "uniform":
            raise FedsimError("mechanism weighs rows by their examples; a private one must not.")

    @property
    def guarantee(self) -> Guarantee:
        """The inner mechanism's."""
        return self.mechanism.guarantee

    def cover(self, layout: Layout) -> tuple[Segment, ...]:
        """The inner mechanism's segments, with what is left of the budget."""
        left = 1 - self.fraction
        inner = self.mechanism.cover(layout)
        return tuple(replace(segment, shares=(left, *segment.shares)) for segment in inner)

    @property
    def sides(self) -> tuple[Side, ...]:
        """The inner mechanism's, with what is left of the budget, and this one."""
        left, half = 1 - self.fraction, self.high / 2
        scalar = Scalar(center=half, half=half)
        inner = (replace(side, shares=(left, *side.shares)) for side in self.mechanism.sides)
        return (*inner, Side(self.name, scalar, (self.fraction,)))

"""A private mean of one number a row (its loss, its accuracy), released with the vector."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedsim.errors import FedsimError
from fedsim.mechanisms.base import BOUND_RANGE, Guarantee, Mechanism, Segment, Side, check_number
from fedsim.rows.layout import Layout

__all__ = ["PrivateScalar"]


@dataclass(frozen=True)
class PrivateScalar(Mechanism):
    """Another mechanism, and beside its vector a noisy mean of one scalar.

    The scalar is clamped to ``[0, high]`` and centred, so that a row that joins moves its sum
    by ``high / 2`` at most: ``mean = high / 2 + (sum of (x - high / 2) + noise) / r``.

    Guarantee: that of the mechanism inside, at the whole multiplier z: of ``1 / z^2`` the
    scalar takes ``fraction`` and leaves the rest; its noise multiplier is ``z / sqrt(fraction)``.

    Parameters
    ----------
    mechanism : Mechanism
    name : str
        Of the scalar, in `PartialSum.add` and `Release.sides`.
    high : float
        The largest value.
    fraction : float
        In [0, 1). 0 is infinite noise: the scalar is not released.
    """

    mechanism: Mechanism
    name: str = "loss"
    high: float = 1.0
    fraction: float = 0.1

    def __post_init__(self) -> None:
        check_number("high", self.high, *BOUND_RANGE)
        if not 0 <= self.fraction < 1:
            raise FedsimError(f"fraction is {self.fraction}; it must be at least 0 and below 1.")
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
        left = 1 - self.fraction
        inner = (replace(side, shares=(left, *side.shares)) for side in self.mechanism.sides)
        return (*inner, Side(self.name, self.high, (self.fraction,)))

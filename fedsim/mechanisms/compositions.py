"""Composed mechanisms: one for every layer, and a private scalar in addition to the row.

Both only describe data for the one releaser: segments and side scalars, each with a share of
``1/z^2``.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, cast

from fedsim.errors import FedsimError
from fedsim.mechanisms.base import (
    NORM,
    Guarantee,
    Mechanism,
    ScalarRange,
    Segment,
    SideScalar,
    require_mechanism,
)
from fedsim.rows.layout import Layout, Parameter
from fedsim.settings import Ge, Lt, check_settings

Pairs = Sequence[tuple[str, Mechanism]]


@dataclass(frozen=True)
class PerLayer(Mechanism):
    """A separate mechanism, sum and noise for each layer.

    Guarantee: the L parts together are one Gaussian of multiplier z. Part l, bounded by its C_l,
    is released at the multiplier ``z / sqrt(share_l)`` (``z * sqrt(L)`` for equal shares), so that
    ``sum_l share_l / z^2 = 1 / z^2``. (A whole row may then have the norm
    ``sqrt(sum_l C_l^2)``, where one mechanism for all allows C.)

    Parameters
    ----------
    parts : Mechanism or sequence of (pattern, Mechanism)
        One mechanism, applied to each layer (a module's parameters, weight and bias together); or
        pairs, where a parameter belongs to the first shell pattern that matches its name.
    shares : sequence of float, optional
        Shares of the budget ``1/z^2``, one for each part, positive, adding up to 1. Default: equal.
    """

    parts: Mechanism | Pairs
    shares: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for pair in self._pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise FedsimError(
                    f"parts has {pair!r}; it must be one Mechanism, or pairs (pattern, Mechanism)."
                )
        for mechanism in self._mechanisms:
            require_mechanism(mechanism, "PerLayer")
            if (
                mechanism.weighting != "uniform"
                or mechanism.side_scalars
                or isinstance(mechanism, PerLayer)
            ):
                raise FedsimError(
                    f"part {mechanism!r} cannot bound one layer; put scalars around PerLayer, and "
                    "no PerLayer inside it."
                )
        check_settings(self)
        if self.shares is None:
            return
        if not (min(self.shares, default=0) > 0 and math.isclose(sum(self.shares), 1)):
            raise FedsimError(f"shares are {self.shares}; they must be positive and add up to 1.")
        if self._pairs and len(self.shares) != len(self._pairs):
            raise FedsimError(f"shares are {len(self.shares)}; parts are {len(self._pairs)}.")

    @property
    def _pairs(self) -> Pairs:
        """Patterns and mechanisms; empty if one is for every layer."""
        return self.parts if isinstance(self.parts, tuple | list) else ()

    @property
    def _mechanisms(self) -> list[Mechanism]:
        return [mechanism for _, mechanism in self._pairs] or [cast(Mechanism, self.parts)]

    @property
    def guarantee(self) -> Guarantee:
        """``"none"`` if a part has no guarantee."""
        return (
            "none"
            if any(mechanism.guarantee == "none" for mechanism in self._mechanisms)
            else "gaussian"
        )

    def segments(self, layout: Layout) -> tuple[Segment, ...]:
        """One segment for each layer or pattern; segment k has the prefix ``k.``."""
        layers = self._layers(layout)
        shares = self.shares or (1 / len(layers),) * len(layers)
        if len(shares) != len(layers):
            raise FedsimError(f"shares are {len(shares)}; the model has {len(layers)} layers.")
        segments = []
        for k, ((mechanism, entries), share) in enumerate(zip(layers, shares, strict=True)):
            layer, columns = layout.subset(entries)
            (inner,) = mechanism.segments(layer)  # a part has a single segment
            shares_in = (share, *inner.shares)
            segments.append(replace(inner, prefix=f"{k}.", columns=columns, shares=shares_in))
        return tuple(segments)

    def _layers(self, layout: Layout) -> list[tuple[Mechanism, list[Parameter]]]:
        """Mechanisms, each with the parameters that it bounds together."""
        # An empty parameter releases nothing, and takes no share of the budget.
        entries = [entry for entry in layout.entries if entry.stop > entry.start]
        if not self._pairs:
            layers: dict[str, list[Parameter]] = {}
            for entry in entries:
                layers.setdefault(entry.name.rpartition(".")[0], []).append(entry)
            return [(self._mechanisms[0], layer) for layer in layers.values()]
        matched: list[list[Parameter]] = [[] for _ in self._pairs]
        for entry in entries:
            fits = (fnmatch.fnmatchcase(entry.name, pattern) for pattern, _ in self._pairs)
            first = next((k for k, fit in enumerate(fits) if fit), None)
            if first is None:
                raise FedsimError(f"parameter '{entry.name}' matches no pattern of the parts.")
            matched[first].append(entry)
        for (pattern, _), layer in zip(self._pairs, matched, strict=True):
            if not layer:
                raise FedsimError(
                    f"pattern '{pattern}' of the parts matches no parameter that patterns before "
                    "it leave."
                )
        return list(zip(self._mechanisms, matched, strict=True))


@dataclass(frozen=True)
class PrivateScalar(Mechanism):
    """Another mechanism, and in addition to its vector the noisy mean of one scalar.

    The scalar is clamped to ``[0, high]`` and centred, so that adding a row changes its sum by at
    most ``high / 2``: ``mean = high / 2 + (sum of (x - high / 2) + noise) / r``.

    Guarantee: that of the inner mechanism, at multiplier z for both together. Of ``1 / z^2`` the
    scalar takes the share ``fraction``, so that its noise multiplier is ``z / sqrt(fraction)``.
    """

    mechanism: Mechanism
    """The mechanism for the update."""
    name: str = "loss"
    """Name of the scalar in `PartialSum.add` and `Release.side_scalars`."""
    high: Annotated[float, NORM] = 1.0
    """The largest value; larger ones are clamped to it."""
    fraction: Annotated[float, Ge(0), Lt(1)] = 0.1
    """The scalar's share of the privacy budget; 0 if it is not released."""

    def __post_init__(self) -> None:
        require_mechanism(self.mechanism, "PrivateScalar")
        super().__post_init__()
        if self.name in self.mechanism.side_scalar_names:
            raise FedsimError(f"name is '{self.name}'; the mechanism inside has such a scalar.")
        if self.mechanism.weighting != "uniform":
            raise FedsimError("mechanism weighs rows by their examples; a private one must not.")

    @property
    def guarantee(self) -> Guarantee:
        """The inner mechanism's guarantee."""
        return self.mechanism.guarantee

    def segments(self, layout: Layout) -> tuple[Segment, ...]:
        """The inner mechanism's segments, with the remaining budget."""
        inner_share = 1 - self.fraction
        inner = self.mechanism.segments(layout)
        return tuple(replace(segment, shares=(inner_share, *segment.shares)) for segment in inner)

    @property
    def side_scalars(self) -> tuple[SideScalar, ...]:
        """The inner mechanism's scalars, with the remaining budget, and this one."""
        inner_share, half = 1 - self.fraction, self.high / 2
        scalar = ScalarRange(center=half, half=half)
        inner = (
            replace(side, shares=(inner_share, *side.shares))
            for side in self.mechanism.side_scalars
        )
        return (*inner, SideScalar(self.name, scalar, (self.fraction,)))

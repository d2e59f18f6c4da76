"""Partial sums of bounded rows: made by workers, merged exactly, then released.

Rows of one sum (a server's), or of n owners at once (clients' examples, clients' shares), are
bounded and summed where they are computed, in the memory of the sums and one chunk of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.kernels.rows import is_supported
from fedsim.mechanisms.base import Segment, Shaped, Side, State, bounded_, per_row
from fedsim.mechanisms.scaling import ScalingBound
from fedsim.rows.dense import BlockRows, Chunks, DenseRows, Rows, Weights, scatter
from fedsim.rows.exact import (
    ALL_OWNERS,
    FREE_ROWS,
    MAX_ROWS,
    GridSum,
    GridSums,
    Owners,
    RowMasks,
    grid_unit,
)
from fedsim.rows.norms import in_safe_range, norms_of, round_up

MEASURED_MARGIN = 2.0**-19
"""Relative margin on norms from factors, whose error is below 2^-20 (`MeasuredRows`)."""


@dataclass(frozen=True)
class SumDefinition:
    """Definition of a sum, the same for all workers that contribute to it.

    Attributes
    ----------
    segments, sides : tuples of Segment, Side
        The mechanism's parts.
    split : mapping of name to float
        Its `Mechanism.noise_multipliers`.
    owners : int or None
        Number of sums; None for a single sum, whose tensors have no leading axis.
    exact : bool
        Whether sums merge exactly, as in `Releaser`.
    double : bool
        Whether rows are float64.
    """

    segments: tuple[Segment, ...]
    sides: tuple[Side, ...]
    split: Mapping[str, float]
    owners: int | None
    device: torch.device
    exact: bool
    double: bool

    @property
    def active_owners(self) -> slice | EllipsisType:
        """Index of the owners that still take part, into a releaser's tensors of all owners."""
        return ... if self.owners is None else slice(self.owners)

    @property
    def most_rows(self) -> int:
        """Largest number of rows for which a sum is exact."""
        return FREE_ROWS if any(segment.bound.free for segment in self.segments) else MAX_ROWS

    @property
    def zeros(self) -> Tensor:
        """Zeros, one for each sum, float64 ``[...]``."""
        shape = () if self.owners is None else (self.owners,)
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


class PartialSum(GridSums):
    """One sum of bounded rows, or n; made by `Releaser.start`, consumed by `Releaser.release`.

    Dense rows are rounded one by one, so that sums have the same bytes however rows are blocked and
    sums merged; factored rows are rounded as one sum per call. ``grids`` are those of each segment,
    with its prefix, and of the side scalars. ``before`` is the mechanism's state before the
    round, from which the next one is computed; ``ready`` is each bound's `Bound.ready` of it.
    """

    def __init__(self, terms: SumDefinition, before: State, ready: Sequence[State]) -> None:
        self.terms, self.before = terms, before
        chunks, zeros = Chunks(), terms.zeros
        self.segments = [
            SegmentSum(segment, segment_ready, terms, chunks)
            for segment, segment_ready in zip(terms.segments, ready, strict=True)
        ]
        grids: dict[str, GridSum] = {}
        for summed in self.segments:
            grids |= summed.segment.named(summed.grids)
        grids |= {side.name: GridSum.scalar(zeros, side.scalar.half) for side in terms.sides}
        super().__init__(grids, terms.most_rows, terms.device)

    def add(
        self,
        rows: Rows,
        *,
        weights: Weights | None = None,
        sides: Mapping[str, Weights] | None = None,
    ) -> Tensor:
        """Bound rows ``[c, d]`` and add them to the one sum.

        Parameters
        ----------
        rows : Rows ``[c, d]``
        weights : ``[c]``, optional
            Applied after bounding. Private mechanisms take numbers in [0, 1], each of which may
            depend only on the row's own client; 0 removes a row from every sum.
        sides : mapping of name to ``[c]``, optional
            Values of the mechanism's side scalars.

        Returns
        -------
        usable : bool ``[c]``
            True for rows that are in the sum.
        """
        device, count = self.terms.device, rows.count
        masks = RowMasks((count,), device)
        if count:
            checked = [
                segment.bound.weights(weights, count, device) for segment in self.terms.segments
            ]
            self._add(rows, checked, None, ALL_OWNERS, masks)
            self.note(masks)
            self._add_sides(sides, masks.usable, ALL_OWNERS)
        return masks.usable

    def add_owners(
        self,
        rows: BlockRows,
        weights: Tensor,
        counts: Sequence[int],
        owners: Owners = ALL_OWNERS,
        *,
        sides: Mapping[str, Weights] | None = None,
        masks: RowMasks | None = None,
    ) -> None:
        """Bound rows ``[k, B, d]`` of some owners and add them to their sums.

        Rows are not counted and weights not checked, so that nothing is read back from a GPU.

        Parameters
        ----------
        rows : BlockRows ``[k, B, d]``
        weights : float64 ``[k, B]``
            1, or 0 for padding.
        counts : sequence of k ints
            Number of rows of each owner; the others are padding.
        owners : slice or int64 Tensor ``[k]``
        sides : mapping of name to ``[k, B]``, optional
        masks : RowMasks ``[k, B]``, optional
            To be filled in.
        """
        self._add(rows, [weights] * len(self.segments), counts, owners, masks)
        if self.terms.sides:
            self._add_sides(sides, weights > 0 if masks is None else masks.usable, owners)

    def _add(
        self,
        rows: Rows,
        weights: Sequence[Tensor],
        counts: Sequence[int] | None,
        owners: Owners,
        masks: RowMasks | None,
    ) -> None:
        """Add rows to every segment's sum, with ``weights`` by segment."""
        self.expect(rows.count)
        # A row that is not finite in one segment contributes to none.
        bad = rows.norms().isnan() if len(self.segments) > 1 else None
        if masks is not None and bad is not None:
            masks.rejected |= bad
        for summed, weight in zip(self.segments, weights, strict=True):
            if bad is not None:
                weight = weight.masked_fill(bad, 0.0)
            summed.add(rows, weight, counts, owners, masks)
            if masks is not None:
                masks.usable &= (weight > 0) & ~masks.rejected

    def joined(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors of the segments, ``[..., size]`` each, as one ``[..., d]``."""
        if self.terms.segments[0].columns is None:
            return vectors[0]
        d = sum(vector.shape[-1] for vector in vectors)
        row = vectors[0].new_empty(*vectors[0].shape[:-1], d)
        for segment, vector in zip(self.terms.segments, vectors, strict=True):
            scatter(row, vector, segment.columns)
        return row

    def _add_sides(
        self, sides: Mapping[str, Weights] | None, usable: Tensor, owners: Owners
    ) -> None:
        """Add side scalars, clamped to their range and centred; NaN and unusable rows add 0."""
        for side in self.terms.sides:
            if sides is None or side.name not in sides:
                raise FedsimError(
                    f"side scalar '{side.name}' is missing; the mechanism releases its mean."
                )
            values = torch.as_tensor(sides[side.name], dtype=torch.float64, device=usable.device)
            if values.shape != usable.shape:
                raise FedsimError(
                    f"side scalar '{side.name}' has shape {tuple(values.shape)}, "
                    f"not {tuple(usable.shape)}."
                )
            center, half = side.scalar
            centred = values.clamp(center - half, center + half) - center
            centred = torch.where(usable & ~values.isnan(), centred, 0.0)
            self.grids[side.name].add_((centred / grid_unit(half))[..., None], owners)


class SegmentSum:
    """Sums of one segment: its vector, called ``sum``, and its bound's scalars and bare sums."""

    def __init__(
        self, segment: Segment, ready: State, terms: SumDefinition, chunks: Chunks
    ) -> None:
        self.segment, self.ready, self._chunks = segment, ready, chunks
        bound, d, zeros = segment.bound, segment.layout.d, terms.zeros
        if bound.free:
            vector = GridSum.free(zeros, d)
        else:
            radius = zeros + bound.radius(ready, d)
            # Noise is on the coarse grid and hides what is finer: no fine sum is needed.
            noisy = any(0 < z < math.inf for z in terms.split.values())
            vector = GridSum.bounded(radius, d, noisy=noisy, exact=terms.exact, double=terms.double)
        self.grids = {"sum": vector}
        for name, scalar in bound.scalars.items():
            self.grids[name] = GridSum.scalar(zeros, scalar.half)
        for name, bare_sum in bound.bare_sums.items():
            narrow_sum = GridSum(zeros, 1, unit=bare_sum.unit)
            self.grids[name] = GridSum.free(zeros, d) if bare_sum.wide else narrow_sum

    def add(
        self,
        rows: Rows,
        weights: Tensor,
        counts: Sequence[int] | None,
        owners: Owners,
        masks: RowMasks | None,
    ) -> None:
        """Add whole rows, of which the segment takes its columns; ``counts``: None for one sum."""
        rows, vector = self.segment.part_of(rows), self.grids["sum"]
        # In order of speed: factored rows are measured and summed by their factors; dense rows that
        # are only multiplied are added by a compiled function in one pass; all others are copied in
        # chunks that fit the cache, bounded there and added.
        if not isinstance(rows, DenseRows) and self._add_measured(rows, weights, owners, masks):
            return
        if counts is None:
            rows = dense = DenseRows(rows.dense())
            if self._add_scaled(dense.tensor, weights, masks):
                return
        for chunk_owners, index, y in self._chunks.of_owners(rows, counts, owners, vector.coarse):
            ready, unit = self._ready_of(chunk_owners)
            weight = weights[index]
            shaped, bad = bounded_(self.segment.bound, y, ready, unit, weight)
            vector.add_(y, chunk_owners)
            self._note(shaped, bad, weight, chunk_owners, index, masks)

    def _add_measured(
        self, rows: Rows, weights: Tensor, owners: Owners, masks: RowMasks | None
    ) -> bool:
        """Add factored rows by their norms and one weighted sum; False if they must be dense."""
        bound, (ready, unit) = self.segment.bound, self._ready_of(owners)
        if not (isinstance(bound, ScalingBound) and bound.only_scales):
            return False
        measured = rows.measure(*bound.whitening(ready))
        if measured is None:
            return False
        # The margin covers the rounding of the formula for norms, and of the sum to the grid.
        longest = measured.norms * (1 + MEASURED_MARGIN)
        shaped = bound.factors(measured.norms, longest, ready, self.segment.layout.d)
        weight = shaped.factor.nan_to_num(nan=0.0) / per_row(unit) * weights
        self.grids["sum"].add_sum_(measured.sum(weight), owners)
        self._note(shaped, shaped.factor.isnan(), weights, owners, ALL_OWNERS, masks)
        return True

    def _add_scaled(self, rows: Tensor, weights: Tensor, masks: RowMasks | None) -> bool:
        """Add rows that only need a factor, by compiled functions.

        False if that is not possible; nothing has been added then.
        """
        vector = self.grids["sum"]
        if not (vector.exact and is_supported(rows)):
            return False
        shaped = self._factors(rows)
        if shaped is None:
            return False
        factors = shaped.factor / vector.unit * weights
        # The kernel multiplies and cannot wipe a non-finite row (NaN times zero is NaN): rows with
        # one among them are left to `bounded_`.
        bad = factors.isnan()
        if bool(bad.any()):
            return False
        vector.add_scaled_(rows, factors)
        self._note(shaped, bad, weights, ALL_OWNERS, ALL_OWNERS, masks)
        return True

    def _factors(self, rows: Tensor) -> Shaped | None:
        """Factors of unchanged rows ``[c, d]``; None if a row needs more than a factor."""
        bound, ready = self.segment.bound, self.ready
        if bound.keeps_rows:
            return bound.shape_(rows, ready)
        if not (isinstance(bound, ScalingBound) and bound.only_scales):
            return None
        if any(vector is not None for vector in bound.whitening(ready)):
            return None
        norms, d = norms_of(rows), rows.shape[1]
        if not in_safe_range(norms):  # extreme rows are rescaled first
            return None
        return bound.factors(norms, round_up(norms, d), ready, d)

    def _ready_of(self, owners: Owners) -> tuple[State, Tensor]:
        """`Bound.ready` and the units of the sums, for these owners."""
        unit = self.grids["sum"].unit
        if owners is ALL_OWNERS:
            return self.ready, unit
        return {name: tensor[owners] for name, tensor in self.ready.items()}, unit[owners]

    def _note(
        self,
        shaped: Shaped,
        bad: Tensor,
        weights: Tensor,
        owners: Owners,
        index: slice | tuple[slice, slice],
        masks: RowMasks | None,
    ) -> None:
        """Add the bound's scalars and bare sums of rows, and fill in their masks."""
        if masks is not None:
            masks.rejected[index].logical_or_(bad)
            masks.clipped[index].logical_or_(shaped.clipped)
        bound = self.segment.bound
        if not (bound.scalars or bound.bare_sums):
            return
        # Scalars are centred, so that padding and rejected rows must add 0 explicitly.
        present = ~bad & (weights > 0)
        for name, scalar in bound.scalars.items():
            values = torch.where(present, shaped.sides[name], 0.0) / grid_unit(scalar.half)
            self.grids[name].add_(values[..., None], owners)
        for name, bare_sum in bound.bare_sums.items():
            values = shaped.sides[name] if bare_sum.wide else shaped.sides[name][..., None]
            values = torch.where(present[..., None], values, 0.0) * weights[..., None]
            self.grids[name].add_(values / bare_sum.unit, owners)

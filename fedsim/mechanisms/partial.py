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
from fedsim.mechanisms.base import (
    BoundedRows,
    Segment,
    SideScalar,
    State,
    bound_and_weight_,
    per_row,
)
from fedsim.mechanisms.scaling import ScalingMechanism
from fedsim.rows.dense import BlockRows, Chunks, DenseRows, Rows, Weights, scatter
from fedsim.rows.exact import (
    ALL_OWNERS,
    MAX_ROWS,
    MAX_UNBOUNDED_ROWS,
    GridSum,
    GridSums,
    Owners,
    RowMasks,
    grid_unit,
    truncate_,
)
from fedsim.rows.norms import in_safe_range, norms_of, round_up

MEASURED_MARGIN = 2.0**-19
"""Relative margin on norms from factors, whose error is below 2^-20 (`MeasuredRows`)."""


@dataclass(frozen=True)
class SumDefinition:
    """Definition of a sum, the same for all workers that contribute to it.

    Attributes
    ----------
    segments, side_scalars : tuples of Segment, SideScalar
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
    side_scalars: tuple[SideScalar, ...]
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
    def max_rows(self) -> int:
        """Largest number of rows for which a sum is exact."""
        return (
            MAX_UNBOUNDED_ROWS
            if any(segment.mechanism.unbounded for segment in self.segments)
            else MAX_ROWS
        )

    @property
    def zeros(self) -> Tensor:
        """Zeros, one for each sum, float64 ``[...]``."""
        shape = () if self.owners is None else (self.owners,)
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


class PartialSum(GridSums):
    """One sum of bounded rows, or n; made by `Releaser.start`, consumed by `Releaser.release`.

    Dense rows are rounded one by one, so that sums have the same bytes however rows are blocked and
    sums merged; factored rows are rounded as one sum per call. ``grids`` are those of each segment,
    with its prefix, and of the side scalars. ``state_before`` is the mechanism's state before the
    round, from which the next one is computed; ``round_states`` are each
    segment's `SimpleMechanism.round_state` of it.
    """

    def __init__(
        self, definition: SumDefinition, state_before: State, round_states: Sequence[State]
    ) -> None:
        self.definition, self.state_before = definition, state_before
        chunks, zeros = Chunks(), definition.zeros
        self.segments = [
            SegmentSum(segment, round_state, definition, chunks)
            for segment, round_state in zip(definition.segments, round_states, strict=True)
        ]
        grids: dict[str, GridSum] = {}
        for summed in self.segments:
            grids |= summed.segment.named(summed.grids)
        grids |= {
            side.name: GridSum.scalar(zeros, side.value_range.half)
            for side in definition.side_scalars
        }
        super().__init__(grids, definition.max_rows, definition.device)

    def add(
        self,
        rows: Rows,
        *,
        weights: Weights | None = None,
        side_scalars: Mapping[str, Weights] | None = None,
    ) -> Tensor:
        """Bound rows ``[c, d]`` and add them to the one sum.

        Parameters
        ----------
        rows : Rows ``[c, d]``
        weights : ``[c]``, optional
            Applied after bounding. Private mechanisms take numbers in [0, 1], each of which may
            depend only on the row's own client; 0 removes a row from every sum.
        side_scalars : mapping of name to ``[c]``, optional
            Values of the mechanism's side scalars.

        Returns
        -------
        usable : bool ``[c]``
            True for rows that are in the sum.
        """
        device, count = self.definition.device, rows.count
        masks = RowMasks((count,), device)
        if count:
            checked = [
                segment.mechanism.weights(weights, count, device)
                for segment in self.definition.segments
            ]
            self._add(rows, checked, None, ALL_OWNERS, masks)
            self.count_rows(masks)
            self._add_side_scalars(side_scalars, masks.usable, ALL_OWNERS)
        return masks.usable

    def add_to_each(
        self,
        targets: Sequence[PartialSum],
        rows: Tensor,
        *,
        weights: Weights,
        side_scalars: Mapping[str, Weights] | None = None,
    ) -> Tensor:
        """Bound dense rows ``[c, d]`` once, and add each to a sum of its own: `add`, row by row.

        Parameters
        ----------
        targets : c PartialSum
            Of the same definition and bounds as this one, from the same state.
        rows : Tensor ``[c, d]``
        weights, side_scalars
            As for `add`.

        Returns
        -------
        usable : bool ``[c]``
        """
        tensor = torch.as_tensor(weights, dtype=torch.float64)
        if len(self.segments) == 1 and not self.definition.side_scalars and rows.is_cpu:
            (summed,) = self.segments
            checked = summed.segment.mechanism.weights(tensor, len(targets), self.definition.device)
            sums = [target.segments[0] for target in targets]
            if (masks := summed.add_to_each(sums, rows, checked)) is not None:
                for target, usable, clipped in zip(
                    targets, masks.usable.tolist(), masks.clipped.tolist(), strict=True
                ):
                    target.expect(1)
                    target.count_row(usable=usable, clipped=clipped)
                return masks.usable
        usable_rows = []
        for row, target in enumerate(targets):
            one = slice(row, row + 1)
            of_row = {name: torch.as_tensor(v)[one] for name, v in (side_scalars or {}).items()}
            usable_rows.append(
                target.add(DenseRows(rows[one]), weights=tensor[one], side_scalars=of_row)
            )
        return torch.cat(usable_rows)

    def add_owners(
        self,
        rows: BlockRows,
        weights: Tensor,
        counts: Sequence[int],
        owners: Owners = ALL_OWNERS,
        *,
        side_scalars: Mapping[str, Weights] | None = None,
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
        side_scalars : mapping of name to ``[k, B]``, optional
        masks : RowMasks ``[k, B]``, optional
            To be filled in.
        """
        self._add(rows, [weights] * len(self.segments), counts, owners, masks)
        if self.definition.side_scalars:
            self._add_side_scalars(
                side_scalars, weights > 0 if masks is None else masks.usable, owners
            )

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

    def join_segments(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors of the segments, ``[..., size]`` each, as one ``[..., d]``."""
        if self.definition.segments[0].columns is None:
            return vectors[0]
        d = sum(vector.shape[-1] for vector in vectors)
        row = vectors[0].new_empty(*vectors[0].shape[:-1], d)
        for segment, vector in zip(self.definition.segments, vectors, strict=True):
            scatter(row, vector, segment.columns)
        return row

    def _add_side_scalars(
        self, side_scalars: Mapping[str, Weights] | None, usable: Tensor, owners: Owners
    ) -> None:
        """Add side scalars, clamped to their range and centred; NaN and unusable rows add 0."""
        for side in self.definition.side_scalars:
            if side_scalars is None or side.name not in side_scalars:
                raise FedsimError(
                    f"side scalar '{side.name}' is missing; the mechanism releases its mean."
                )
            values = torch.as_tensor(
                side_scalars[side.name], dtype=torch.float64, device=usable.device
            )
            if values.shape != usable.shape:
                raise FedsimError(
                    f"side scalar '{side.name}' has shape {tuple(values.shape)}, "
                    f"not {tuple(usable.shape)}."
                )
            center, half = side.value_range
            centred = values.clamp(center - half, center + half) - center
            centred = torch.where(usable & ~values.isnan(), centred, 0.0)
            self.grids[side.name].add_((centred / grid_unit(half))[..., None], owners)


class SegmentSum:
    """Sums of one segment: its vector, ``sum``, and its mechanism's scalars and noiseless sums."""

    def __init__(
        self, segment: Segment, round_state: State, definition: SumDefinition, chunks: Chunks
    ) -> None:
        self.segment, self.round_state, self._chunks = segment, round_state, chunks
        mechanism, d, zeros = segment.mechanism, segment.layout.d, definition.zeros
        if mechanism.unbounded:
            vector = GridSum.unbounded(zeros, d)
        else:
            radius = zeros + mechanism.radius(round_state, d)
            # Noise is on the coarse grid and hides what is finer: no fine sum is needed.
            noisy = any(0 < z < math.inf for z in definition.split.values())
            vector = GridSum.bounded(
                radius, d, noisy=noisy, exact=definition.exact, double=definition.double
            )
        self.grids = {"sum": vector}
        for name, scalar in mechanism.scalars.items():
            self.grids[name] = GridSum.scalar(zeros, scalar.half)
        for name, noiseless_sum in mechanism.noiseless_sums.items():
            narrow_sum = GridSum(zeros, 1, unit=noiseless_sum.unit)
            self.grids[name] = GridSum.unbounded(zeros, d) if noiseless_sum.wide else narrow_sum

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
        for chunk_owners, index, y in self._chunks.split_by_owner(
            rows, counts, owners, vector.coarse
        ):
            round_state, unit = self._round_state_of(chunk_owners)
            weight = weights[index]
            bounded, bad = bound_and_weight_(self.segment.mechanism, y, round_state, unit, weight)
            vector.add_(y, chunk_owners)
            self._record_rows(bounded, bad, weight, chunk_owners, index, masks)

    def _add_measured(
        self, rows: Rows, weights: Tensor, owners: Owners, masks: RowMasks | None
    ) -> bool:
        """Add factored rows by their norms and one weighted sum; False if they must be dense."""
        mechanism, (round_state, unit) = self.segment.mechanism, self._round_state_of(owners)
        if not (isinstance(mechanism, ScalingMechanism) and mechanism.only_scales):
            return False
        measured = rows.measure(*mechanism.whitening(round_state))
        if measured is None:
            return False
        # The margin covers the rounding of the formula for norms, and of the sum to the grid.
        longest = measured.norms * (1 + MEASURED_MARGIN)
        bounded = mechanism.factors(measured.norms, longest, round_state, self.segment.layout.d)
        weight = bounded.factor.nan_to_num(nan=0.0) / per_row(unit) * weights
        self.grids["sum"].add_sum_(measured.sum(weight), owners)
        self._record_rows(bounded, bounded.factor.isnan(), weights, owners, ALL_OWNERS, masks)
        return True

    def _add_scaled(self, rows: Tensor, weights: Tensor, masks: RowMasks | None) -> bool:
        """Add rows that only need a factor, by compiled functions.

        False if that is not possible; nothing has been added then.
        """
        if (scaled := self._scaled(rows, weights)) is None:
            return False
        bounded, factors = scaled
        self.grids["sum"].add_scaled_(rows, factors)
        self._record_rows(bounded, factors.isnan(), weights, ALL_OWNERS, ALL_OWNERS, masks)
        return True

    def add_to_each(
        self, targets: Sequence[SegmentSum], rows: Tensor, weights: Tensor
    ) -> RowMasks | None:
        """Add each row to its own target, by compiled functions; None if that is not possible."""
        if (scaled := self._scaled(rows, weights)) is None:
            return None
        bounded, factors = scaled
        mechanism, masks = self.segment.mechanism, RowMasks((len(rows),), rows.device)
        if mechanism.scalars:
            return None
        masks.clipped |= bounded.clipped
        masks.usable &= weights > 0
        noiseless: dict[str, Tensor] = {}
        for name, noiseless_sum in mechanism.noiseless_sums.items():
            if noiseless_sum.wide:
                return None
            values = torch.where(masks.usable, bounded.scalars[name], 0.0) * weights
            noiseless[name] = truncate_(values / noiseless_sum.unit)
        for row, target in enumerate(targets):
            one = slice(row, row + 1)
            target.grids["sum"].add_scaled_(rows[one], factors[one])
            for name, units in noiseless.items():
                target.grids[name].coarse += units[one]
        return masks

    def _scaled(self, rows: Tensor, weights: Tensor) -> tuple[BoundedRows, Tensor] | None:
        """A mechanism's result for dense rows, and their factors in units of the grid.

        None if compiled functions cannot add these rows.
        """
        vector = self.grids["sum"]
        if not (vector.exact and is_supported(rows)):
            return None
        bounded = self._factors(rows)
        if bounded is None:
            return None
        factors = bounded.factor / vector.unit * weights
        # The kernel multiplies and cannot wipe a non-finite row (NaN times zero is NaN): rows with
        # one among them are left to `bound_and_weight_`.
        return None if bool(factors.isnan().any()) else (bounded, factors)

    def _factors(self, rows: Tensor) -> BoundedRows | None:
        """Factors of unchanged rows ``[c, d]``; None if a row needs more than a factor."""
        mechanism, round_state = self.segment.mechanism, self.round_state
        if mechanism.keeps_rows:
            return mechanism.bound_(rows, round_state)
        if not (isinstance(mechanism, ScalingMechanism) and mechanism.only_scales):
            return None
        if any(vector is not None for vector in mechanism.whitening(round_state)):
            return None
        norms, d = norms_of(rows), rows.shape[1]
        if not in_safe_range(norms):  # extreme rows are rescaled first
            return None
        return mechanism.factors(norms, round_up(norms, d), round_state, d)

    def _round_state_of(self, owners: Owners) -> tuple[State, Tensor]:
        """`SimpleMechanism.round_state` and the units of the sums, for these owners."""
        unit = self.grids["sum"].unit
        if owners is ALL_OWNERS:
            return self.round_state, unit
        return {name: tensor[owners] for name, tensor in self.round_state.items()}, unit[owners]

    def _record_rows(
        self,
        bounded: BoundedRows,
        bad: Tensor,
        weights: Tensor,
        owners: Owners,
        index: slice | tuple[slice, slice],
        masks: RowMasks | None,
    ) -> None:
        """Add the mechanism's scalars and noiseless sums of rows, and fill in their masks."""
        if masks is not None:
            masks.rejected[index].logical_or_(bad)
            masks.clipped[index].logical_or_(bounded.clipped)
        mechanism = self.segment.mechanism
        if not (mechanism.scalars or mechanism.noiseless_sums):
            return
        # Scalars are centred, so that padding and rejected rows must add 0 explicitly.
        present = ~bad & (weights > 0)
        for name, scalar in mechanism.scalars.items():
            values = torch.where(present, bounded.scalars[name], 0.0) / grid_unit(scalar.half)
            self.grids[name].add_(values[..., None], owners)
        for name, noiseless_sum in mechanism.noiseless_sums.items():
            values = (
                bounded.scalars[name] if noiseless_sum.wide else bounded.scalars[name][..., None]
            )
            values = torch.where(present[..., None], values, 0.0) * weights[..., None]
            self.grids[name].add_(values / noiseless_sum.unit, owners)

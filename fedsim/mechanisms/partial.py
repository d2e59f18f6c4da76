"""Partial sums of bounded rows: what workers make, what merges exactly, what is released.

Rows of one sum (a server's), or of n owners at once (clients' examples, clients' shares),
are bounded and summed where they are; memory is that of the sums and of one chunk of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms.base import Part, Shaped, Side, State, Weights, bounded_, scatter
from fedsim.mechanisms.drawing import share_multiplier
from fedsim.rows.dense import BlockRows, Chunks, DenseRows, Rows
from fedsim.rows.exact import (
    EVERYBODY,
    FREE_ROWS,
    FREE_UNIT,
    GRID_BITS,
    MAX_ROWS,
    GridSum,
    Owners,
    grid_unit,
    more_rows,
)

__all__ = ["Masks", "PartSum", "PartialSum", "Shares", "Terms"]

# A looser bound (none, nearly) makes a coarse grid: without noise that would show.
LOOSE = 64.0
# No honest share lies so many standard deviations of its noise beyond its bound, in one entry
# (probability below 1e-300) or in all of them together (e^-FARTHEST, 4e-18).
FARTHEST = 40.0


@dataclass(frozen=True)
class Terms:
    """What all who contribute to a sum must agree on.

    Attributes
    ----------
    parts, sides : tuple of Part, of Side
        The mechanism's.
    split : mapping of name to float
        `Mechanism.noise_multipliers`.
    owners : int or None
        Number of sums; None is one sum, whose tensors have no leading axis.
    device : torch.device
    exact : bool
        False for the sums of one local step, which nobody merges: what noise does not need is
        not rounded.
    double : bool
        Rows are float64.
    """

    parts: tuple[Part, ...]
    sides: tuple[Side, ...]
    split: Mapping[str, float]
    owners: int | None
    device: torch.device
    exact: bool
    double: bool

    @property
    def noisy(self) -> bool:
        """Whether noise will be added; it lives on the coarse grid."""
        return any(0 < z < math.inf for z in self.split.values())

    @property
    def zeros(self) -> Tensor:
        """A number for each sum, float64."""
        shape = () if self.owners is None else (self.owners,)
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


@dataclass(frozen=True)
class Shares:
    """What clients send where they bound and noise their own rows.

    Attributes
    ----------
    rows : float64 ``[n, d]``
        Bounded rows in the mechanism's coordinates, with noise, on the sum's grid.
    sides : mapping of name to float64 ``[n]``
        Noisy scalars, centred.
    usable : bool ``[n]``
        False where the client's row was not finite; its share is noise all the same and the
        server drops it.
    """

    rows: Tensor
    sides: Mapping[str, Tensor]
    usable: Tensor


class PartialSum:
    """Bounded rows in one sum, or in n; `Releaser.start` makes it, `Releaser.release` takes it.

    What travels between processes is `state`: tensors as large as the sums, and counts. Dense
    rows are rounded one by one, so that sums have the same bytes however they are blocked and
    merged; rows that are not materialised are rounded as one sum a call.

    Parameters
    ----------
    terms : Terms
    before : State
        The mechanism's state, of which the next one is made.
    ready : sequence of State
        What each part's bound needs of it, by `Bound.ready`.
    """

    def __init__(self, terms: Terms, before: State, ready: Sequence[State]) -> None:
        self.terms, self.before = terms, before
        chunks = Chunks()
        self.parts = [
            PartSum(part, own, terms, chunks) for part, own in zip(terms.parts, ready, strict=True)
        ]
        zeros = terms.zeros
        self.sides = {
            side.name: GridSum(zeros + side.high / 2, 1, unit=grid_unit(side.high / 2))
            for side in terms.sides
        }
        free = any(part.bound.free for part in terms.parts)
        self._rows, self._most = 0, FREE_ROWS if free else MAX_ROWS
        # Usable, rejected, clipped: on a GPU they stay there until somebody asks.
        self._counts = torch.zeros(3, dtype=torch.int64, device=terms.device)

    @property
    def count(self) -> int:
        """Rows that the sum contains."""
        return int(self._counts[0])

    @property
    def rejected(self) -> int:
        """Rows that were not finite and contributed nothing."""
        return int(self._counts[1])

    @property
    def clipped(self) -> int:
        """Rows that were longer than a bound. The operator's: it is not noised."""
        return int(self._counts[2])

    @property
    def grids(self) -> dict[str, GridSum]:
        """Every sum by its name: ``sum`` and scalars of a part after its prefix, and sides."""
        inner = {
            part.part.prefix + name: grid
            for part in self.parts
            for name, grid in part.grids.items()
        }
        return inner | self.sides

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
            Applied after bounding. Private mechanisms take numbers in [0, 1], which may not
            depend on anything but the row's own client; 0 removes a row from every sum.
        sides : mapping of name to ``[c]``, optional
            Values of the side scalars that the mechanism asks for.

        Returns
        -------
        usable : bool ``[c]``
            Which rows the sum now contains.
        """
        device = self.terms.device
        masks = Masks((rows.count,), device)
        if rows.count == 0:
            return masks.usable
        given = [part.part.bound.weights(weights, rows.count, device) for part in self.parts]
        self._add(rows, given, None, EVERYBODY, masks)
        self._counts += _numbers(masks.usable, masks.rejected, masks.clipped & masks.usable)
        self._add_sides(sides, masks.usable)
        return masks.usable

    def add_owners(
        self,
        rows: BlockRows,
        weights: Tensor,
        counts: Sequence[int],
        owners: Owners = EVERYBODY,
        *,
        sides: Mapping[str, Weights] | None = None,
        masks: Masks | None = None,
    ) -> None:
        """Bound rows ``[k, B, d]`` of some owners and add them to their sums.

        They are not counted, and their weights not checked: nothing is read back from a GPU.

        Parameters
        ----------
        rows : BlockRows ``[k, B, d]``
        weights : float64 ``[k, B]``
            1 or, for a row that is not there, 0.
        counts : sequence of k ints
            The first so many rows of each owner are there.
        owners : slice or int64 Tensor ``[k]``
        sides : mapping of name to ``[k, B]``, optional
        masks : Masks ``[k, B]``, optional
            Filled in.
        """
        self._add(rows, [weights] * len(self.parts), counts, owners, masks)
        if self.sides:
            self._add_sides(sides, weights > 0 if masks is None else masks.usable)

    def _add(
        self,
        rows: Rows,
        weights: Sequence[Tensor],
        counts: Sequence[int] | None,
        owners: Owners,
        masks: Masks | None,
    ) -> None:
        self._rows = more_rows(self._rows, rows.count, self._most)
        # A row that is not finite in one layer contributes to none.
        bad = rows.norms().isnan() if len(self.parts) > 1 else None
        if masks is not None and bad is not None:
            masks.rejected |= bad
        for part, given in zip(self.parts, weights, strict=True):
            there = given if bad is None else given.masked_fill(bad, 0.0)
            part.add(rows, there, counts, owners, masks)
            if masks is not None:
                masks.usable &= (there > 0) & ~masks.rejected

    def add_shares(self, shares: Shares, *, asked: int = 1) -> Tensor:
        """Add what clients bounded and noised themselves; which of it is usable, bool ``[n]``.

        A share counts as a whole or not at all: only then is one top-up right for all parts.
        One that its bound and noise cannot have made is dropped like one that is not finite:
        beyond C by more than `FARTHEST` standard deviations s in one entry, or in norm by more
        than ``s (sqrt(d) + sqrt(2 FARTHEST))``, which the norm of d normal draws exceeds with
        probability ``e^-FARTHEST`` at most (Laurent and Massart 2000, lemma 1).

        Parameters
        ----------
        shares : Shares
        asked : int
            Number of clients asked in this round: each has ``z^2 C^2 / asked`` of the noise.
        """
        device = self.terms.device
        rows, usable = DenseRows(shares.rows.to(device, torch.float64)), shares.usable.to(device)
        split, missing = self.terms.split, torch.full(usable.shape, torch.nan)
        # What has infinite noise is never sent.
        grids = {name: grid for name, grid in self.grids.items() if split[name] < math.inf}
        pieces = {part.part.prefix + "sum": part.columns(rows).dense() for part in self.parts}
        for name in grids.keys() - pieces.keys():
            pieces[name] = shares.sides.get(name, missing).to(device, torch.float64)[:, None]
        for name, piece in pieces.items():
            radius, unit = grids[name].radius, grids[name].unit
            std = radius * share_multiplier(split[name], asked)
            root = math.sqrt(piece.shape[1])
            # Noise is rounded to the grid. NaN is not below anything.
            entry = radius + std * FARTHEST + unit
            norm = radius + std * (root + math.sqrt(2 * FARTHEST)) + unit * root
            usable = usable & (torch.maximum(piece.amax(1), -piece.amin(1)) <= entry)
            usable = usable & (torch.linalg.vector_norm(piece, dim=1) <= norm)
        self._rows = more_rows(self._rows, int(usable.sum()), self._most)
        for name, piece in pieces.items():
            grids[name].add_(piece[usable] / grids[name].unit)
        self._counts += _numbers(usable, ~usable, torch.zeros_like(usable))
        return usable

    def joined(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors of the parts ``[..., size]`` as one ``[..., d]``."""
        if self.parts[0].part.columns is None:
            return vectors[0]
        whole = vectors[0].new_empty(*vectors[0].shape[:-1], sum(v.shape[-1] for v in vectors))
        for part, vector in zip(self.parts, vectors, strict=True):
            scatter(whole, vector, part.part.columns)
        return whole

    def state(self) -> dict[str, Tensor]:
        """All that `merge` needs: sums in units (not copies), the units, and counts."""
        found = {"rows": torch.tensor(self._rows), "counts": self._counts.clone()}
        for name, grid in self.grids.items():
            found |= {f"{name}.unit": grid.unit, name: grid.coarse}
            if grid.fine is not None:
                found[f"{name}.fine"] = grid.fine
        return found

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add the `state` of another sum of the same round; exact in any order and tree.

        Raises
        ------
        FedsimError
            If it is of another bound, layout or round, or has too many rows.
        """
        own = self.state()
        fits = self.terms.exact and own.keys() == state.keys()
        if not fits or any(
            own[name].shape != tensor.shape
            or (name.endswith(".unit") and not torch.equal(own[name], tensor.to(own[name])))
            for name, tensor in state.items()
        ):
            raise FedsimError("a partial sum is of other bounds; only sums of one round merge.")
        self._rows = more_rows(self._rows, int(state["rows"]), self._most)
        self._counts += state["counts"].to(self._counts)
        for name, grid in self.grids.items():
            grid.merge_(state[name], state.get(f"{name}.fine"))

    def _add_sides(self, sides: Mapping[str, Weights] | None, usable: Tensor) -> None:
        """Clamped to [0, high] and centred; what is NaN or unusable adds nothing."""
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
            centred = values.clamp(0.0, side.high) - side.high / 2
            centred = torch.where(usable & ~values.isnan(), centred, 0.0)
            self.sides[side.name].add_((centred / grid_unit(side.high / 2))[..., None])


class PartSum:
    """The sums of one part: its vector, the scalars its bound makes, and raw rows if it asks."""

    def __init__(self, part: Part, ready: State, terms: Terms, chunks: Chunks) -> None:
        self.part, self.ready, self._chunks = part, ready, chunks
        bound, d, zeros = part.bound, part.layout.d, terms.zeros
        self.grids = {"sum": self._vector(terms, zeros + bound.radius(ready, d), d)}
        self._units = {k: v.unit or grid_unit(v.half) for k, v in bound.scalars.items()}
        for name, scalar in bound.scalars.items():
            self.grids[name] = GridSum(zeros + scalar.half, 1, unit=self._units[name])
        if bound.keeps_raw:
            self.grids["raw"] = GridSum.free(zeros, d)

    def _vector(self, terms: Terms, radius: Tensor, d: int) -> GridSum:
        if self.part.bound.free:
            return GridSum.free(radius, d)
        if not terms.exact:
            return GridSum(radius, d, rounding="rows" if terms.noisy else "none")
        fine = not terms.noisy and (terms.double or float(radius.max()) > LOOSE)
        return GridSum(radius, d, fine_bits=GRID_BITS if fine else 0)

    def columns(self, rows: Rows) -> Rows:
        """The part's own columns."""
        return rows if self.part.columns is None else rows.columns(self.part.columns)

    def add(
        self,
        rows: Rows,
        weights: Tensor,
        counts: Sequence[int] | None,
        owners: Owners,
        masks: Masks | None,
    ) -> None:
        """See `PartialSum.add_owners`; ``rows`` are whole, ``counts`` None for the one sum."""
        rows, bound, vector = self.columns(rows), self.part.bound, self.grids["sum"]
        made = None if rows.materialised else bound.implicit(rows, *self._of(owners), weights)
        if made is not None:
            shaped, total = made
            vector.add_sum_(total, owners)
            self._note(shaped, shaped.factor.isnan(), weights, owners, EVERYBODY, masks)
            return
        for some, index, y in self._pieces(rows, counts, owners):
            ready, unit = self._of(some)
            weight = weights[index]
            raw = y * (weight / FREE_UNIT)[..., None] if bound.keeps_raw else None
            shaped, bad = bounded_(bound, y, ready, unit, weight)
            vector.add_(y, some)
            if raw is not None:
                self.grids["raw"].add_(raw.masked_fill_(bad[..., None], 0.0), some)
            self._note(shaped, bad, weight, some, index, masks)

    def _of(self, owners: Owners) -> tuple[State, Tensor]:
        """What bounding these owners' rows takes, and the units of their sums."""
        unit = self.grids["sum"].unit
        if owners is EVERYBODY:
            return self.ready, unit
        return {name: tensor[owners] for name, tensor in self.ready.items()}, unit[owners]

    def _pieces(
        self, rows: Rows, counts: Sequence[int] | None, owners: Owners
    ) -> Iterator[tuple[Owners, slice | tuple[slice, slice], Tensor]]:
        """Whose rows, which of them, and a float64 copy ``[..., c, d]``, chunk after chunk."""
        if counts is None:
            for chunk, y in self._chunks.of(rows.dense()):
                yield owners, chunk, y
            return
        like = self.grids["sum"].coarse
        for index, y in self._chunks.of_block(cast(BlockRows, rows), counts, like):
            if torch.is_tensor(owners):
                yield owners[index[0]], index, y
            else:
                chosen = range(len(like))[owners][index[0]]
                yield slice(chosen.start, chosen.stop), index, y

    def _note(
        self,
        shaped: Shaped,
        bad: Tensor,
        weights: Tensor,
        owners: Owners,
        index: slice | tuple[slice, slice],
        masks: Masks | None,
    ) -> None:
        """Add the scalars of rows, and say what became of them."""
        if masks is not None:
            masks.rejected[index].logical_or_(bad)
            masks.clipped[index].logical_or_(shaped.clipped)
        for name, scalar in self.part.bound.scalars.items():
            values = torch.where(~bad & (weights > 0), shaped.sides[name], 0.0)
            if scalar.unit is not None:
                values = values * weights
            self.grids[name].add_((values / self._units[name])[..., None], owners)


class Masks:
    """What became of each row: bool tensors of one shape."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.usable = torch.ones(shape, dtype=torch.bool, device=device)
        self.rejected = torch.zeros_like(self.usable)
        self.clipped = torch.zeros_like(self.usable)


def _numbers(*masks: Tensor) -> Tensor:
    """Of true entries of each mask, int64."""
    return torch.stack([mask.sum() for mask in masks])

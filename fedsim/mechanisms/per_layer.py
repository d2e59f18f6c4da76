"""A bound of its own for every layer."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms.base import (
    Accumulator,
    Guarantee,
    Mechanism,
    Release,
    Shares,
    State,
    Weights,
    row_layout,
    row_weights,
)
from fedsim.mechanisms.noise import NoiseSource
from fedsim.rows.dense import DenseRows, Rows
from fedsim.rows.layout import Entry, Layout

__all__ = ["PerLayer", "part_layout", "scatter"]

Part = tuple[Mechanism, State, list[slice]]


@dataclass(frozen=True)
class PerLayer(Mechanism):
    """Each layer bounded, summed and noised by a mechanism of its own.

    Guarantee: the L parts together are one Gaussian of multiplier z. Part l is released at
    ``z / sqrt(share_l)`` on its own C_l, which is ``z * sqrt(L)`` with equal shares, so that
    ``sum_l share_l / z^2 = 1 / z^2``. (A global bound needs norm C where this one may reach
    ``sqrt(sum_l C_l^2)``.)

    Parameters
    ----------
    parts : Mechanism or sequence of (pattern, Mechanism)
        One mechanism: for each layer (a module's parameters, weight and bias together).
        Pairs: a parameter belongs to the first shell pattern that matches its name.
    shares : sequence of float, optional
        Of the budget, one a part, positive, adding up to 1. Default: equal.
    """

    parts: Mechanism | tuple[tuple[str, Mechanism], ...]
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for mechanism in self._mechanisms():
            if mechanism.weighting != "uniform" or mechanism.side_names:
                raise FedsimError(
                    f"part {mechanism!r} cannot be one layer's; put scalars around PerLayer."
                )
        if self.shares is None:
            return
        if not (min(self.shares, default=0) > 0 and math.isclose(sum(self.shares), 1)):
            raise FedsimError(f"shares are {self.shares}; they must be positive and add up to 1.")
        if not isinstance(self.parts, Mechanism) and len(self.shares) != len(self.parts):
            raise FedsimError(f"shares are {len(self.shares)}; parts are {len(self.parts)}.")

    def _mechanisms(self) -> list[Mechanism]:
        if isinstance(self.parts, Mechanism):
            return [self.parts]
        return [mechanism for _, mechanism in self.parts]

    @property
    def guarantee(self) -> Guarantee:
        """``"none"`` if a part has none."""
        return (
            "none" if any(part.guarantee == "none" for part in self._mechanisms()) else "gaussian"
        )

    def shown(self, layout: Layout) -> tuple[str, ...]:
        """Every part's, as ``0.clip-norm``."""
        return tuple(
            f"{k}.{name}"
            for k, (mechanism, entries) in enumerate(self._groups(layout))
            for name in mechanism.shown(_layout_of(entries))
        )

    def init(self, layout: Layout) -> State:
        """Part k's state under names ``k.*``, and its columns ``[slices, 2]``."""
        state: dict[str, Tensor] = {}
        groups = self._groups(layout)
        if self.shares is not None and len(self.shares) != len(groups):
            raise FedsimError(f"shares are {len(self.shares)}; the model has {len(groups)} layers.")
        for k, (mechanism, entries) in enumerate(groups):
            state[f"{k}.columns"] = torch.tensor(_spans(entries))
            for name, tensor in mechanism.init(_layout_of(entries)).items():
                state[f"{k}.{name}"] = tensor
        return state

    def _groups(self, layout: Layout) -> list[tuple[Mechanism, list[Entry]]]:
        if isinstance(self.parts, Mechanism):
            layers: dict[str, list[Entry]] = {}
            for entry in layout.entries:
                layers.setdefault(entry.name.rpartition(".")[0], []).append(entry)
            return [(self.parts, entries) for entries in layers.values()]
        groups: list[tuple[Mechanism, list[Entry]]] = [(m, []) for _, m in self.parts]
        for entry in layout.entries:
            found = [
                k
                for k, (pattern, _) in enumerate(self.parts)
                if fnmatch.fnmatchcase(entry.name, pattern)
            ]
            if not found:
                raise FedsimError(f"parameter '{entry.name}' matches no pattern of the parts.")
            groups[found[0]][1].append(entry)
        for (pattern, _), (_, entries) in zip(self.parts, groups, strict=True):
            if not entries:
                raise FedsimError(f"pattern '{pattern}' of the parts is left with no parameter.")
        return groups

    def layers(self, layout: Layout) -> list[tuple[Mechanism, list[slice]]]:
        """Mechanism and columns of every part."""
        return [
            (mechanism, [slice(start, stop) for start, stop in _spans(entries)])
            for mechanism, entries in self._groups(layout)
        ]

    def _split(self, state: State) -> list[Part]:
        """Mechanism, state and columns of every part."""
        parts: list[Part] = []
        count = sum(name.endswith(".columns") and name.count(".") == 1 for name in state)
        mechanisms = self._mechanisms()
        for k in range(count):
            prefix = f"{k}."
            own = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
            spans = own.pop("columns").tolist()
            mechanism = mechanisms[k] if len(mechanisms) == count else mechanisms[0]
            parts.append((mechanism, own, [slice(start, stop) for start, stop in spans]))
        return parts

    def _part_multiplier(self, noise_multiplier: float, k: int, count: int) -> float:
        share = 1 / count if self.shares is None else self.shares[k]
        return noise_multiplier / math.sqrt(share)

    def noise_multipliers(
        self, noise_multiplier: float, denominator: float, state: State | None = None
    ) -> Mapping[str, float]:
        """See `Mechanism`; names are ``0.sum``, ``1.sum`` and so on."""
        if state is None and isinstance(self.parts, Mechanism):
            raise FedsimError("state is missing; the number of layers is in it.")
        mechanisms = (
            self._mechanisms() if state is None else [part[0] for part in self._split(state)]
        )
        return {
            f"{k}.{name}": z
            for k, mechanism in enumerate(mechanisms)
            for name, z in mechanism.noise_multipliers(
                self._part_multiplier(noise_multiplier, k, len(mechanisms)), denominator
            ).items()
        }

    def sensitivity(self, state: State, layout: Layout) -> float:
        """``sqrt(sum_l C_l^2)``."""
        return math.hypot(
            *(
                mechanism.sensitivity(own, part_layout(layout, columns))
                for mechanism, own, columns in self._split(state)
            )
        )

    def bound(self, block: Tensor, state: State | None = None) -> Tensor:
        """See `Mechanism`. Without a state the whole row is one layer."""
        state = self.init(row_layout(block)) if state is None else state
        out = torch.empty_like(block)
        for mechanism, own, columns in self._split(state):
            bounded = mechanism.bound(DenseRows(block).columns(columns).dense(), own)
            scatter(out, bounded, columns)
        return out.masked_fill(DenseRows(block).norms().isnan()[:, None], 0.0)

    def accumulate(
        self, state: State, layout: Layout, *, device: torch.device | str = "cpu"
    ) -> Accumulator:
        """See `Mechanism`."""
        parts = [
            (mechanism.accumulate(own, part_layout(layout, columns), device=device), columns)
            for mechanism, own, columns in self._split(state)
        ]
        return _LayerAccumulator(parts, torch.device(device))

    def release(
        self,
        state: State,
        total: Accumulator,
        *,
        noise_multiplier: float,
        denominator: float,
        noise: NoiseSource,
        asked: int | None = None,
    ) -> Release:
        """See `Mechanism`."""
        if not isinstance(total, _LayerAccumulator):
            raise TypeError(f"total is a {type(total).__name__}, not made by accumulate().")
        parts = self._split(state)
        new: dict[str, Tensor] = {n: t for n, t in state.items() if n.endswith(".columns")}
        sides: dict[str, float] = {}
        info: dict[str, float] = {}
        means = []
        for k, ((mechanism, own, _), (part, _)) in enumerate(zip(parts, total.parts, strict=True)):
            release = mechanism.release(
                own,
                part,
                noise_multiplier=self._part_multiplier(noise_multiplier, k, len(parts)),
                denominator=denominator,
                noise=noise,
                asked=asked,
            )
            means.append(release.mean)
            new.update({f"{k}.{name}": tensor for name, tensor in release.state.items()})
            sides.update({f"{k}.{name}": value for name, value in release.sides.items()})
            info.update({f"{k}.{name}": value for name, value in release.info.items()})
        mean = torch.empty(sum(map(len, means)), dtype=torch.float64, device=means[0].device)
        for (_, _, columns), values in zip(parts, means, strict=True):
            scatter(mean, values, columns)
        return Release(mean, new, sides, info)

    def share(
        self,
        block: Tensor,
        state: State,
        *,
        noise_multiplier: float,
        denominator: float,
        asked: int,
        noise: Sequence[NoiseSource],
        sides: Mapping[str, Weights] | None = None,
    ) -> Shares:
        """See `Mechanism`."""
        parts = self._split(state)
        rows = torch.empty(block.shape, dtype=torch.float64, device=block.device)
        usable = ~DenseRows(block).norms().isnan()
        scalars: dict[str, Tensor] = {}
        for k, (mechanism, own, columns) in enumerate(parts):
            shares = mechanism.share(
                DenseRows(block).columns(columns).dense(),
                own,
                noise_multiplier=self._part_multiplier(noise_multiplier, k, len(parts)),
                denominator=denominator,
                asked=asked,
                noise=noise,
            )
            scatter(rows, shares.rows, columns)
            usable = usable & shares.usable
            scalars.update({f"{k}.{name}": value for name, value in shares.sides.items()})
        return Shares(rows, scalars, usable)


class _LayerAccumulator(Accumulator):
    def __init__(self, parts: list[tuple[Accumulator, list[slice]]], device: torch.device) -> None:
        self.parts = parts
        self._rejected = 0
        self._device = device

    @property
    def count(self) -> int:
        return self.parts[0][0].count

    @property
    def rejected(self) -> int:
        return self._rejected

    @property
    def clipped(self) -> int:
        """In any layer, at most: the largest count of a layer."""
        return max(part.clipped for part, _ in self.parts)

    def add(
        self,
        rows: Rows,
        *,
        weights: Weights | None = None,
        sides: Mapping[str, Weights] | None = None,
    ) -> Tensor:
        # A row that is not finite in one layer contributes to none.
        bad = rows.norms().isnan()
        self._rejected += int(bad.sum())
        given = row_weights(weights, rows.count, self._device)
        given = torch.ones_like(bad, dtype=torch.float64) if given is None else given
        given = given.masked_fill(bad, 0.0)
        for part, columns in self.parts:
            part.add(rows.columns(columns), weights=given)
        return given > 0

    def add_shares(self, shares: Shares) -> None:
        shares = shares.checked(self._device)
        usable = shares.usable
        self._rejected += int((~usable).sum())
        for k, (part, columns) in enumerate(self.parts):
            rows = DenseRows(shares.rows).columns(columns).dense()
            own = {
                name.removeprefix(f"{k}."): values
                for name, values in shares.sides.items()
                if name.startswith(f"{k}.")
            }
            part.add_shares(Shares(rows, own, usable))


def _layout_of(entries: Sequence[Entry]) -> Layout:
    return Layout.of({e.name: torch.empty(e.shape, dtype=e.dtype) for e in entries})


def _spans(entries: list[Entry]) -> list[tuple[int, int]]:
    """Columns of these entries, neighbours joined."""
    spans: list[tuple[int, int]] = []
    for entry in entries:
        if spans and spans[-1][1] == entry.start:
            spans[-1] = (spans[-1][0], entry.stop)
        else:
            spans.append((entry.start, entry.stop))
    return spans


def part_layout(layout: Layout, columns: list[slice]) -> Layout:
    """Layout of the parameters in these columns, as one entry."""
    size = sum(part.stop - part.start for part in columns)
    return Layout.of({"part": torch.empty(size, dtype=layout.dtype)})


def scatter(out: Tensor, values: Tensor, columns: list[slice]) -> None:
    """Put ``values [..., size]`` into these columns of ``out [..., d]``."""
    start = 0
    for part in columns:
        size = part.stop - part.start
        out[..., part] = values[..., start : start + size]
        start += size

"""Releases of many clients at once, each of a sum of rows of its own.

What `Mechanism.accumulate` and `Mechanism.release` are for one sum, `releases` gives for
those of ``n`` clients, round after round, with the same noise from the same sources. One rule
says how: mechanisms with one Gaussian (`GaussianMechanism`), and `PerLayer` of such, take the
whole block in tensors with a client axis and never read a value back from a GPU. Any other
goes client by client: one that keeps raw statistics, has none of our sums (`NoPrivacy`,
`PrivateScalar`, a user's own), or overrides how one sum is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim.mechanisms.base import Accumulator, Mechanism, State
from fedsim.mechanisms.exact import add_rows_, grid_unit, grid_units, more_rows, truncate_
from fedsim.mechanisms.gaussian import GaussianMechanism, Released, Shaped
from fedsim.mechanisms.noise import NoiseSource, normals
from fedsim.mechanisms.per_layer import PerLayer, part_layout, scatter
from fedsim.rows.dense import BlockRows, Chunks, DenseRows
from fedsim.rows.layout import Layout

__all__ = ["Releases", "releases"]

ALL = slice(None)

Clients = slice | Tensor
"""Some of n clients: a slice, or their numbers in int64."""


class Releases(ABC):
    """Successive releases of ``n`` clients: `begin`, any number of `add`, `release`."""

    @property
    @abstractmethod
    def state(self) -> State:
        """The mechanism's state, each entry ``[n, ...]``."""

    @abstractmethod
    def begin(self, active: int) -> None:
        """Empty sums of the first ``active`` clients; the others have left for good."""

    @abstractmethod
    def add(
        self, rows: BlockRows, weights: Tensor, counts: Sequence[int], clients: Clients = ALL
    ) -> None:
        """Bound rows ``[k, B, d]`` of some clients and add them to their sums.

        Parameters
        ----------
        rows : BlockRows ``[k, B, d]``
        weights : float64 ``[k, B]``
            1 or, for a row that is not there, 0.
        counts : sequence of k ints
            The first so many rows of each client are there.
        clients : slice or int64 Tensor ``[k]``
        """

    @abstractmethod
    def release(self, noise: Sequence[NoiseSource]) -> Tensor:
        """Noisy means, float64 ``[active, d]``, good until the next `begin`.

        ``noise`` has a source for each active client.
        """


def releases(
    mechanism: Mechanism,
    state: State,
    layout: Layout,
    *,
    noise_multiplier: float,
    denominators: Sequence[float],
    device: torch.device,
) -> Releases:
    """How this mechanism releases the sums of n clients.

    Parameters
    ----------
    mechanism : Mechanism
    state : mapping of str to Tensor ``[n, ...]``
        On ``device``.
    layout : Layout
    noise_multiplier : float
    denominators : sequence of n floats
    device : torch.device
    """
    kind: Any = _OneByOne
    if _together(mechanism):
        kind = _Layers if isinstance(mechanism, PerLayer) else _Gaussians
    made: Releases = kind(mechanism, state, layout, noise_multiplier, denominators, device)
    return made


def _together(mechanism: Mechanism) -> bool:
    kind = type(mechanism)
    for base in (GaussianMechanism, PerLayer):
        if isinstance(mechanism, base):
            # Who overrides how one sum is made means it for many.
            if kind.accumulate is not base.accumulate or kind.release is not base.release:
                return False
            if isinstance(mechanism, PerLayer):
                return all(_together(part) for part in mechanism._mechanisms())
            return isinstance(mechanism, GaussianMechanism) and not mechanism._keeps_raw
    return False


def _part(state: State, clients: Clients) -> dict[str, Tensor]:
    return {name: tensor[clients] for name, tensor in state.items()}


class _Together(Releases):
    """Releases whose noise is drawn in one go."""

    sizes: tuple[int, ...]
    """Lengths of the vectors of noise that a client's release takes, one after another."""

    def __init__(self, noise_multiplier: float, device: torch.device) -> None:
        self._noisy, self._device = noise_multiplier > 0, device

    def release(self, noise: Sequence[NoiseSource]) -> Tensor:
        return self.noised(normals(noise, self.sizes, self._device) if self._noisy else None)

    @abstractmethod
    def noised(self, draws: Tensor | None) -> Tensor:
        """Release with these standard normal draws ``[active, sum of sizes]``; overwritten."""


class _Gaussians(_Together):
    """Sums of a `GaussianMechanism`, in units of each client's own grid."""

    def __init__(
        self,
        mechanism: GaussianMechanism,
        state: State,
        layout: Layout,
        noise_multiplier: float,
        denominators: Sequence[float],
        device: torch.device,
    ) -> None:
        super().__init__(noise_multiplier, device)
        self._state = state
        self._mechanism = mechanism
        self._scalars = mechanism._scalars()
        self.sizes = (layout.d, *(1 for _ in self._scalars))
        splits = [mechanism.noise_multipliers(noise_multiplier, r) for r in denominators]
        total = torch.zeros(len(splits), layout.d, dtype=torch.float64, device=device)
        self._sums = {"sum": total, **{k: total.new_zeros(len(total)) for k in self._scalars}}
        self._z = {k: total.new_tensor([split[k] for split in splits]) for k in splits[0]}
        self._denominators = total.new_tensor(denominators)
        self._chunks = Chunks()

    @property
    def state(self) -> State:
        return self._state

    def begin(self, active: int) -> None:
        self._state = _part(self._state, slice(active))
        self._z = _part(self._z, slice(active))
        self._denominators = self._denominators[:active]
        self._sums = {name: own[:active].zero_() for name, own in self._sums.items()}
        self._ready = self._mechanism._ready(self._state)
        radius = self._mechanism._radius(self._ready, self.sizes[0])
        self._radius = torch.zeros_like(self._denominators) + radius
        self._unit = grid_units(self._radius)
        self._rows = 0

    def add(
        self, rows: BlockRows, weights: Tensor, counts: Sequence[int], clients: Clients = ALL
    ) -> None:
        self._rows = more_rows(self._rows, rows.count)
        sums = _part(self._sums, clients)
        self._add(rows, weights, counts, _part(self._ready, clients), self._unit[clients], sums)
        if isinstance(clients, Tensor):  # then these sums are copies
            for name, own in self._sums.items():
                own[clients] = sums[name]

    def _add(
        self,
        rows: BlockRows,
        weights: Tensor,
        counts: Sequence[int],
        ready: State,
        unit: Tensor,
        sums: State,
    ) -> None:
        """Add to the sums of the same clients."""
        implicit = None
        if not isinstance(rows, DenseRows):
            implicit = self._mechanism._implicit(rows, ready, unit, weights)
        if implicit is not None:
            shaped, bounded = implicit
            sums["sum"].add_(bounded)
            self._add_scalars(shaped, weights, sums)
            return
        for (some, part), y in self._chunks.of_block(rows, counts, sums["sum"]):
            weight, own = weights[some, part], _part(sums, some)
            shaped, _ = self._mechanism.units_(y, _part(ready, some), unit[some], weight)
            # Towards zero, row by row: none gets longer, and their sum is exact.
            add_rows_(own["sum"], truncate_(y) if self._noisy else y)
            self._add_scalars(shaped, weight, own)

    def _add_scalars(self, shaped: Shaped, weights: Tensor, sums: State) -> None:
        for name, scalar in self._scalars.items():
            present = ~shaped.factor.isnan() & (weights > 0)
            values = torch.where(present, shaped.sides[name], 0.0) / grid_unit(scalar.half)
            sums[name].add_(truncate_(values).sum(1))

    def noised(self, draws: Tensor | None) -> Tensor:
        total, r, d = self._sums["sum"], self._denominators, self.sizes[0]
        if draws is not None:
            std = self._z["sum"] * self._radius / self._unit
            noise = draws[:, :d].mul_(std[:, None]).round_()
            truncate_(total).add_(noise)
        # A unit is a power of two: one division rounds as a product and a division would.
        mean = total.div_((r / self._unit)[:, None])
        mean = self._mechanism._restore(mean, self._ready)
        sides: dict[str, float | Tensor] = {}
        for at, (name, scalar) in enumerate(self._scalars.items(), start=d):
            unit, value = grid_unit(scalar.half), self._sums[name]
            if draws is not None:
                value = value + (draws[:, at] * (self._z[name] * scalar.half / unit)).round_()
            sides[name] = scalar.center + value * unit / r
        split = {name: z[:, None] for name, z in self._z.items()}
        released = Released(mean, sides, split, r[:, None], None)
        self._state = self._mechanism._next(self._ready, released)
        return mean


class _Layers(_Together):
    """Sums of `PerLayer`, part by part."""

    def __init__(
        self,
        mechanism: PerLayer,
        state: State,
        layout: Layout,
        noise_multiplier: float,
        denominators: Sequence[float],
        device: torch.device,
    ) -> None:
        super().__init__(noise_multiplier, device)
        layers = mechanism.layers(layout)
        self._columns = [columns for _, columns in layers]
        self._kept = {f"{k}.columns": state[f"{k}.columns"] for k in range(len(layers))}
        self._parts: list[_Together] = []
        for k, (part, columns) in enumerate(layers):
            own = part_layout(layout, columns)
            made = releases(
                part,
                {name: state[f"{k}.{name}"] for name in part.init(own)},
                own,
                noise_multiplier=mechanism._part_multiplier(noise_multiplier, k, len(layers)),
                denominators=denominators,
                device=device,
            )
            assert isinstance(made, _Together)
            self._parts.append(made)
        self.sizes = tuple(size for part in self._parts for size in part.sizes)
        self._mean = torch.empty(len(denominators), layout.d, dtype=torch.float64, device=device)

    @property
    def state(self) -> State:
        own = {
            f"{k}.{name}": tensor
            for k, part in enumerate(self._parts)
            for name, tensor in part.state.items()
        }
        return self._kept | own

    def begin(self, active: int) -> None:
        self._kept = _part(self._kept, slice(active))
        self._mean = self._mean[:active]
        for part in self._parts:
            part.begin(active)

    def add(
        self, rows: BlockRows, weights: Tensor, counts: Sequence[int], clients: Clients = ALL
    ) -> None:
        # A row that is not finite in one layer contributes to none.
        weights = weights.masked_fill(rows.norms().isnan(), 0.0)
        for part, columns in zip(self._parts, self._columns, strict=True):
            part.add(rows.columns(columns), weights, counts, clients)

    def noised(self, draws: Tensor | None) -> Tensor:
        start = 0
        for part, columns in zip(self._parts, self._columns, strict=True):
            stop = start + sum(part.sizes)
            own = None if draws is None else draws[:, start:stop]
            scatter(self._mean, part.noised(own), columns)
            start = stop
        return self._mean


class _OneByOne(Releases):
    """Any mechanism, through its sums of one client each."""

    def __init__(
        self,
        mechanism: Mechanism,
        state: State,
        layout: Layout,
        noise_multiplier: float,
        denominators: Sequence[float],
        device: torch.device,
    ) -> None:
        self._mechanism, self._layout, self._device = mechanism, layout, device
        self._states: list[State] = [
            {name: tensor[k] for name, tensor in state.items()} for k in range(len(denominators))
        ]
        self._noise_multiplier, self._denominators = noise_multiplier, denominators
        self._totals: list[Accumulator] = []

    @property
    def state(self) -> State:
        return {name: torch.stack([own[name] for own in self._states]) for name in self._states[0]}

    def begin(self, active: int) -> None:
        self._states = self._states[:active]
        self._totals = [
            self._mechanism.accumulate(own, self._layout, device=self._device)
            for own in self._states
        ]

    def add(
        self, rows: BlockRows, weights: Tensor, counts: Sequence[int], clients: Clients = ALL
    ) -> None:
        for k, client in enumerate(torch.arange(len(self._totals))[clients].tolist()):
            self._totals[client].add(rows[k, slice(counts[k])], weights=weights[k, : counts[k]])

    def release(self, noise: Sequence[NoiseSource]) -> Tensor:
        means = []
        for k, (total, source) in enumerate(zip(self._totals, noise, strict=True)):
            released = self._mechanism.release(
                self._states[k],
                total,
                noise_multiplier=self._noise_multiplier,
                denominator=self._denominators[k],
                noise=source,
            )
            self._states[k] = released.state
            means.append(released.mean)
        return torch.stack(means)

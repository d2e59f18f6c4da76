"""The interface of every mechanism: bound rows, sum them, add noise once.

A mechanism turns each row into one that lies in an L2 ball of known radius, in coordinates
of its own (AdaCliP's are whitened). The bounded rows are summed exactly, isotropic noise of
standard deviation ``z * radius`` is put on the sum once, and everything after that (division
by a denominator that does not depend on the data, change of coordinates, new state) is
post-processing. Named scalars, each with a bound and a noise multiplier of its own, may go
with the vector; together they cost what one Gaussian of multiplier z does:
``1/z^2 = sum_j 1/z_j^2``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms.exact import GridSum, truncate_
from fedsim.mechanisms.layout import Layout
from fedsim.mechanisms.noise import NoiseSource, share_multiplier, top_up_multiplier
from fedsim.mechanisms.rows import Chunks, DenseRows, Rows, chunks

__all__ = [
    "Accumulator",
    "GaussianMechanism",
    "Guarantee",
    "Mechanism",
    "Release",
    "Shaped",
    "Shares",
    "State",
    "Weighting",
    "Weights",
    "row_layout",
    "row_weights",
]

State = Mapping[str, Tensor]
Guarantee = Literal["gaussian", "none"]
Weighting = Literal["uniform", "num-examples"]
Weights = Tensor | npt.NDArray[np.float64] | npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Release:
    """What leaves a mechanism in one round.

    Attributes
    ----------
    mean : float64 ``[d]``
        Noisy mean row, to be added to the parameters.
    state : State
        The mechanism's state for the next round.
    sides : mapping of name to float
        Noisy means of the side scalars.
    info : mapping of name to float
        Post-processed diagnostics (the ``clip-norm`` that was used), as public as the mean.
    """

    mean: Tensor
    state: State
    sides: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, float] = field(default_factory=dict)


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


class Accumulator(ABC):
    """A sum in the making; memory does not grow with the number of rows."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Rows that the sum contains."""

    @property
    @abstractmethod
    def rejected(self) -> int:
        """Rows that were not finite and contributed nothing."""

    @property
    @abstractmethod
    def clipped(self) -> int:
        """Rows that were longer than their bound. The operator's: it is not noised."""

    @abstractmethod
    def add(
        self,
        rows: Rows,
        *,
        weights: Weights | None = None,
        sides: Mapping[str, Weights] | None = None,
    ) -> Tensor:
        """Bound ``rows`` and add them.

        Parameters
        ----------
        rows : Rows ``[n, d]``
        weights : ``[n]``, optional
            Applied after bounding. Private mechanisms take numbers in [0, 1], which may not
            depend on anything but the row's own client; 0 removes a row from every sum.
        sides : mapping of name to ``[n]``, optional
            Values of the side scalars that the mechanism asks for.

        Returns
        -------
        usable : bool ``[n]``
            Which rows the sum now contains.
        """

    @abstractmethod
    def add_shares(self, shares: Shares) -> None:
        """Add what clients bounded and noised themselves; unusable shares are dropped."""


class Mechanism(ABC):
    """Bounds, sums and noises rows. Subclasses are frozen dataclasses without hidden state."""

    @property
    def guarantee(self) -> Guarantee:
        """``"gaussian"``: a release is one Gaussian of multiplier z on a sum of sensitivity C.

        Adjacency is add-remove (or zero-out) of one row; replace-one doubles the sensitivity,
        which is the accountant's business. ``"none"``: no (epsilon, delta) whatever the noise.
        """
        return "gaussian"

    @property
    def weighting(self) -> Weighting:
        """What `Accumulator.add` takes as weights beyond a mask."""
        return "uniform"

    @property
    def side_names(self) -> tuple[str, ...]:
        """Scalars that `Accumulator.add` must be given."""
        return ()

    def init(self, layout: Layout) -> State:
        """State before the first round."""
        return {}

    @abstractmethod
    def noise_multipliers(self, noise_multiplier: float, denominator: float) -> Mapping[str, float]:
        """Noise multipliers of the parts of one release: ``1/z^2 = sum_j 1/z_j^2``.

        The vector is called ``sum``, a scalar by its name.

        Raises
        ------
        FedsimError
            If no such split exists.
        """

    @abstractmethod
    def bound(self, block: Tensor, state: State | None = None) -> Tensor:
        """What each row of ``block [n, d]`` contributes: ``[n, d]``, same dtype.

        Non-finite rows contribute zero. Without ``state``, that of the first round.
        """

    @abstractmethod
    def accumulate(
        self, state: State, layout: Layout, *, device: torch.device | str = "cpu"
    ) -> Accumulator:
        """An empty sum for one round."""

    @abstractmethod
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
        """Noise the sum, once, and divide.

        Parameters
        ----------
        noise_multiplier : float
            Standard deviation of the noise on the sum over C, all parts taken together.
        denominator : float
            The expected number of rows; public, never a count of rows seen.
        noise : NoiseSource
        asked : int, optional
            For a sum of shares: how many clients were asked. The server then adds only what
            the missing ones would have.
        """

    @abstractmethod
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
        """Bound and noise the rows of ``n`` clients, on the clients' side.

        Each share has noise of variance ``z^2 C^2 / asked``, from that client's own source.

        Parameters
        ----------
        block : Tensor ``[n, d]``
        asked : int
            Number of clients asked in this round, n or more.
        noise : sequence of n NoiseSource
        """


class Shaped(NamedTuple):
    """Rows that ``factor [c]`` brings into the ball; NaN marks a non-finite row.

    ``clipped`` says which of them were longer than their bound.
    """

    factor: Tensor
    clipped: Tensor
    sides: Mapping[str, Tensor]

    @classmethod
    def cat(cls, parts: Sequence[Shaped]) -> Shaped:
        """One chunk after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.factor for part in parts]),
            torch.cat([part.clipped for part in parts]),
            {k: torch.cat([part.sides[k] for part in parts]) for k in parts[0].sides},
        )


class GaussianMechanism(Mechanism):
    """Everything but the shape of the bound.

    A subclass gives `_radius` and `_shape`, and where it has them `_restore` (back to the
    parameters' coordinates), `_next` (new state), `_scalars` (scalars made from the rows).
    """

    @abstractmethod
    def _radius(self, state: State, d: int) -> float:
        """L2 norm that no bounded row exceeds, in the mechanism's coordinates."""

    @abstractmethod
    def _shape(self, y: Tensor, state: State) -> Shaped:
        """Overwrite float64 rows ``y [c, d]`` and say by which factor they fit the ball."""

    def _restore(self, w: Tensor, state: State) -> Tensor:
        """Rows or a mean ``w [..., d]`` back in the parameters' coordinates."""
        return w

    def _scalars(self, state: State) -> Mapping[str, float]:
        """Half-widths of the scalars that `_shape` returns."""
        return {}

    def _next(self, state: State, released: Released) -> tuple[State, dict[str, float]]:
        """State after a release, and what to show; a function of released values alone."""
        return state, {}

    def noise_multipliers(self, noise_multiplier: float, denominator: float) -> Mapping[str, float]:
        """See `Mechanism`: all of it on the vector."""
        return {"sum": noise_multiplier}

    def bound(self, block: Tensor, state: State | None = None) -> Tensor:
        """See `Mechanism`; rounded to the grid as the sum rounds it."""
        state = self.init(row_layout(block)) if state is None else state
        unit = self._grid(state, block).unit
        out = torch.empty_like(block)
        for part, y in chunks(block):
            shaped = self._units_(y, state, unit, None)
            rows = self._restore(truncate_(y).mul_(unit), state)
            out[part] = rows.masked_fill(shaped.factor.isnan()[:, None], 0.0)
        return out

    def accumulate(
        self, state: State, layout: Layout, *, device: torch.device | str = "cpu"
    ) -> Accumulator:
        """See `Mechanism`."""
        return _GridAccumulator(self, state, layout, device)

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
        if not isinstance(total, _GridAccumulator):
            raise TypeError(f"total is a {type(total).__name__}, not made by accumulate().")
        if not denominator > 0:
            raise FedsimError(f"denominator is {denominator}; it must be above 0.")
        split = dict(self.noise_multipliers(noise_multiplier, denominator))
        drawn = split
        if asked is not None:
            drawn = {k: top_up_multiplier(z, asked, total.count) for k, z in split.items()}
        w = total.grid.noisy(drawn["sum"] * total.grid.radius, noise) / denominator
        scalars = {
            name: grid.noisy(drawn[name] * grid.radius, noise).item() / denominator
            for name, grid in total.scalars.items()
        }
        mean = self._restore(w, state)
        state, info = self._next(state, Released(mean, scalars, split, denominator, total))
        return Release(mean, state, scalars, info)

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
        split = {
            name: share_multiplier(z, asked)
            for name, z in self.noise_multipliers(noise_multiplier, denominator).items()
        }
        layout = row_layout(block)
        rows = torch.empty(block.shape, dtype=torch.float64, device=block.device)
        usable = torch.empty(len(block), dtype=torch.bool, device=block.device)
        scalars = {
            name: torch.empty(len(block), dtype=torch.float64, device=block.device)
            for name in self._scalars(state)
        }
        for k, source in enumerate(noise):
            one = _GridAccumulator(self, state, layout, block.device)
            usable[k] = one.add(DenseRows(block[k : k + 1]))[0]
            rows[k] = one.grid.noisy(split["sum"] * one.grid.radius, source)
            for name, grid in one.scalars.items():
                scalars[name][k] = grid.noisy(split[name] * grid.radius, source)[0]
        return Shares(rows, scalars, usable)

    def _grid(self, state: State, block: Tensor) -> GridSum:
        return GridSum(self._radius(state, block.shape[1]), 0)

    def _units_(self, y: Tensor, state: State, unit: float, weights: Tensor | None) -> Shaped:
        """Overwrite ``y`` by bounded, weighted rows in units of the grid."""
        shaped = self._shape(y, state)
        factor = shaped.factor / unit
        if weights is not None:
            factor = factor * weights
        bad = factor.isnan()
        # A row of zeros times NaN is NaN: non-finite rows are wiped, not multiplied by zero.
        if y.is_cuda or bool(bad.any()):
            y.masked_fill_(bad[:, None], 0.0)
            factor = factor.masked_fill(bad, 0.0)
        y.mul_(factor[:, None])
        return shaped


@dataclass(frozen=True)
class Released:
    """What `GaussianMechanism._next` sees: the noisy mean and scalars, and their noise.

    ``total`` is for the one mechanism that is documented as not private.
    """

    mean: Tensor
    scalars: Mapping[str, float]
    noise_multipliers: Mapping[str, float]
    denominator: float
    total: Accumulator


class _GridAccumulator(Accumulator):
    """Exact sum of a `GaussianMechanism`'s rows and scalars."""

    def __init__(
        self,
        mechanism: GaussianMechanism,
        state: State,
        layout: Layout,
        device: torch.device | str,
    ) -> None:
        self._mechanism = mechanism
        self._state = state
        self.grid = GridSum(
            mechanism._radius(state, layout.d),
            layout.d,
            fine=layout.dtype == torch.float64,
            device=device,
        )
        self.scalars = {
            name: GridSum(radius, 1, device=device)
            for name, radius in mechanism._scalars(state).items()
        }
        self._chunks = Chunks()
        # Count, rejected, clipped: on the device, so that no block waits for it.
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)

    @property
    def count(self) -> int:
        return int(self._counts[0])

    @property
    def rejected(self) -> int:
        return int(self._counts[1])

    @property
    def clipped(self) -> int:
        return int(self._counts[2])

    def add(
        self,
        rows: Rows,
        *,
        weights: Weights | None = None,
        sides: Mapping[str, Weights] | None = None,
    ) -> Tensor:
        block = rows.dense()
        given = row_weights(weights, block)
        shapes = []
        for part, y in self._chunks.of(block):
            weight = None if given is None else given[part]
            shapes.append(self._mechanism._units_(y, self._state, self.grid.unit, weight))
            self.grid.add_(y)
        if not shapes:
            return torch.zeros(0, dtype=torch.bool, device=block.device)
        shaped = Shaped.cat(shapes)
        good = ~shaped.factor.isnan()
        present = good if given is None else good & (given > 0)
        counts = [present.sum(), (~good).sum(), (shaped.clipped & present).sum()]
        self._counts += torch.stack(counts)
        for name, grid in self.scalars.items():
            values = torch.where(present, shaped.sides[name], 0.0) / grid.unit
            grid.add_(values[:, None])
        return present

    def add_shares(self, shares: Shares) -> None:
        usable = shares.usable & torch.isfinite(shares.rows.sum(1))
        for values in shares.sides.values():
            usable = usable & torch.isfinite(values)
        rows = shares.rows[usable].to(torch.float64) / self.grid.unit
        self.grid.add_(rows)
        for name, grid in self.scalars.items():
            grid.add_(shares.sides[name][usable].to(torch.float64)[:, None] / grid.unit)
        self._counts += torch.stack([usable.sum(), (~usable).sum(), torch.zeros_like(usable.sum())])


def row_layout(block: Tensor) -> Layout:
    """Layout of a row that nobody described: one nameless entry."""
    return Layout.of({"row": block.new_empty(block.shape[1])})


def row_weights(weights: Weights | None, block: Tensor, highest: float = 1.0) -> Tensor | None:
    """Weights as float64 ``[n]`` on the block's device.

    Raises
    ------
    FedsimError
        If one is negative, above ``highest``, or NaN: that would exceed the sensitivity.
    """
    if weights is None:
        return None
    tensor = torch.as_tensor(weights, dtype=torch.float64, device=block.device)
    if tensor.shape != (len(block),):
        raise FedsimError(f"weights have shape {tuple(tensor.shape)}, not ({len(block)},).")
    if not bool(((tensor >= 0) & (tensor <= highest)).all()):
        raise FedsimError(
            f"weights of this mechanism's rows must lie in [0, {highest:g}]; one does not."
        )
    return tensor

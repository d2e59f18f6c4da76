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
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms.noise import NoiseSource
from fedsim.rows.dense import Rows
from fedsim.rows.layout import Layout

__all__ = [
    "Accumulator",
    "Counts",
    "Guarantee",
    "Mechanism",
    "Release",
    "Shares",
    "State",
    "Weighting",
    "Weights",
    "row_layout",
    "row_weights",
    "state_on",
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

    def checked(self, device: torch.device) -> Shares:
        """On ``device``, and usable only where everything is finite.

        A share counts as a whole or not at all: only then is one top-up right for all parts.
        """
        rows, usable = self.rows.to(device, torch.float64), self.usable.to(device)
        sides = {name: values.to(device, torch.float64) for name, values in self.sides.items()}
        usable = usable & torch.isfinite(rows.sum(1))
        for values in sides.values():
            usable = usable & torch.isfinite(values)
        return Shares(rows, sides, usable)


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

    def shown(self, layout: Layout) -> tuple[str, ...]:
        """Names of what a release shows beside the mean: `Release.info` and `Release.sides`."""
        return self.side_names

    def init(self, layout: Layout) -> State:
        """State before the first round."""
        return {}

    @abstractmethod
    def noise_multipliers(
        self, noise_multiplier: float, denominator: float, state: State | None = None
    ) -> Mapping[str, float]:
        """Noise multipliers of the parts of one release: ``1/z^2 = sum_j 1/z_j^2``.

        The vector is called ``sum``, a scalar by its name. ``state`` is needed only by
        `PerLayer`, whose parts depend on the layout.

        Raises
        ------
        FedsimError
            If no such split exists.
        """

    @abstractmethod
    def sensitivity(self, state: State, layout: Layout) -> float:
        """C: the L2 norm that one row can add to the sum, in the mechanism's coordinates."""

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


class Counts:
    """Numbers of true entries of masks, summed over blocks.

    On a GPU they stay there until somebody asks, so that no block waits for them.
    """

    def __init__(self) -> None:
        self._on_cpu = [0, 0, 0]
        self._on_gpu: Tensor | None = None

    def add(self, *masks: Tensor) -> None:
        """Count bool masks ``[n]``, at most three, always in the same order."""
        if masks[0].is_cuda:
            counts = torch.stack([mask.sum() for mask in masks])
            self._on_gpu = counts if self._on_gpu is None else self._on_gpu + counts
            return
        for index, mask in enumerate(masks):
            self._on_cpu[index] += int(np.count_nonzero(mask.numpy()))

    def total(self, index: int) -> int:
        """Count of the mask at this place."""
        gpu = 0 if self._on_gpu is None else int(self._on_gpu[index])
        return self._on_cpu[index] + gpu


def row_layout(block: Tensor) -> Layout:
    """Layout of a row that nobody described: one entry."""
    return Layout.of({"row": block.new_empty(block.shape[1])})


def state_on(state: State, device: torch.device) -> State:
    """State with its vectors on ``device``; scalars stay on the CPU, where they are read."""
    return {name: tensor.to(device) if tensor.ndim else tensor for name, tensor in state.items()}


def row_weights(
    weights: Weights | None, count: int, device: torch.device, highest: float = 1.0
) -> Tensor | None:
    """Weights as float64 ``[count]`` on ``device``.

    Raises
    ------
    FedsimError
        If one is negative, above ``highest``, or NaN: that would exceed the sensitivity.
    """
    if weights is None:
        return None
    tensor = torch.as_tensor(weights, dtype=torch.float64, device=device)
    if tensor.shape != (count,):
        raise FedsimError(f"weights have shape {tuple(tensor.shape)}; it must be ({count},).")
    if not bool(((tensor >= 0) & (tensor <= highest)).all()):
        raise FedsimError(f"weights of rows must lie in [0, {highest:g}]; one does not.")
    return tensor

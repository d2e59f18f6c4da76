"""A local step of a block: gather the batch, take its gradient, update the state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm, State, Step
from fedsim.clients.gradients import Gradient
from fedsim.training.data import ClientData
from fedsim.training.paths.choice import Path
from fedsim.training.paths.plain import PlainPath

__all__ = ["LocalStep"]


@dataclass(frozen=True)
class LocalStep:
    """One step of ``n`` clients, kernel by kernel.

    Parameters
    ----------
    path : Path
    data : ClientData
    algorithm : LocalAlgorithm
    dtype : torch.dtype
        The model's.
    max_norm : float
        A batch's gradient that is longer is shortened to it; 0 for any length.
    statistics : int64 Tensor ``[s]``, optional
        Places in a packed row of what the model itself has written there when it was run, and no
        rule of the algorithm's (decay, a pull) may move.
    """

    path: Path
    data: ClientData
    algorithm: LocalAlgorithm
    dtype: torch.dtype
    max_norm: float = 0.0
    statistics: Tensor | None = None

    def __call__(
        self,
        state: State,
        index: Tensor,
        weight: Tensor,
        step: Step,
        seeds: Sequence[int] | None = None,
    ) -> Tensor:
        """Update the state.

        Parameters
        ----------
        state : State
        index : int64 Tensor ``[n, B]``
            Examples.
        weight : Tensor ``[n, B]``
            What each counts; 0 on padding.
        step : Step
        seeds : sequence of n ints, optional
            Of what the model draws for each client; on the plain path.

        Returns
        -------
        Tensor ``[n, B]``
            Loss of each example, unweighted.
        """
        x, y = self.data.inputs(index, self.dtype), self.data.targets(index, self.dtype)
        return self.on(state, x, y, weight, step, seeds)

    def on(
        self,
        state: State,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        step: Step,
        seeds: Sequence[int] | None = None,
    ) -> Tensor:
        """The same, of examples that are there, ``[n, B, ...]``."""
        gradient, losses = self.gradient(self.algorithm.point(state), x, y, weight, seeds)
        if self.statistics is None:
            self.take(state, gradient, step)
            return losses
        seen = state["theta"][:, self.statistics]
        self.take(state, gradient, step)
        state["theta"][:, self.statistics] = seen
        return losses

    def lent(self, point: Tensor) -> AbstractContextManager[object]:
        """For many steps of one client whose gradients are taken at ``point [1, D]``."""
        return self.path.lent(point) if isinstance(self.path, PlainPath) else nullcontext()

    def take(self, state: State, gradient: Gradient, step: Step) -> None:
        """Update the state by gradients that are there, shortened where that is asked for."""
        if self.max_norm:
            # As torch.nn.utils.clip_grad_norm_ does it.
            gradient = gradient.scaled((self.max_norm / (gradient.norms() + 1e-6)).clamp_(max=1.0))
        self.algorithm.step(state, gradient, step)

    def gradient(
        self, point: Tensor, x: Tensor, y: Tensor, weight: Tensor, seeds: Sequence[int] | None
    ) -> tuple[Gradient, Tensor]:
        """Gradients and losses of these examples, each client's at its own ``point [n, D]``."""
        if seeds is not None:
            assert isinstance(self.path, PlainPath)
            return self.path.gradient(point, x, y, weight, seeds)
        return self.path.gradient(point, x, y, weight)

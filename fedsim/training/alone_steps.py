"""Local steps of one client after another, each all of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.base import State, Step
from fedsim.rows.alignment import empty_rows
from fedsim.training.batches import Batches
from fedsim.training.hidden_draws import Seeds
from fedsim.training.local_step import LocalStep
from fedsim.training.paths.alone import AlonePath
from fedsim.training.steps import Bench, Ended, Floats, Steps

__all__ = ["AloneSteps", "LayerSteps"]

# Inputs of so many bytes are gathered at once: those of some batches.
GATHERED = 2**19


class AloneSteps(Steps):
    """As `Steps`, of a path that goes client by client: each is there once, for all its steps."""

    def __init__(
        self, bench: Bench, batches: Batches, round: int, seeds: Seeds | None = None
    ) -> None:
        super().__init__(bench, batches, round, seeds)
        self._seen = np.zeros(batches.weight.shape)

    def run(
        self, start: Tensor, numbers: State, kept: Mapping[str, Tensor], present: Tensor
    ) -> Ended:
        """See `Steps`."""
        ended, step = [], self.bench.step
        theta = empty_rows(len(start), start.shape[1], start.dtype)
        assert isinstance(step, LocalStep)  # it is captured on a GPU only
        for k, steps in enumerate(self.batches.steps.tolist()):
            client, row = slice(k, k + 1), theta[k : k + 1]
            # Not all rows at once: what a client has just been given is in the cache.
            state = self.start(
                row.copy_(start[client]),
                {name: values[client] for name, values in numbers.items()},
                {name: values[client] for name, values in kept.items()},
                present[client],
            )
            with step.lent(self.bench.algorithm.point(state)):
                self._walk(state, k, steps)
            end = self._end(state, 0)
            if end.theta.data_ptr() != row.data_ptr():
                row.copy_(end.theta)
            ended.append(end)
        return Ended.joined(ended, theta)

    def _walk(self, state: State, k: int, steps: int) -> None:
        """All steps of client ``k``."""
        data, dtype, step = self.bench.data, self.bench.dtype, self.bench.step
        assert isinstance(step, LocalStep)  # it is captured on a GPU only
        client_seeds = None if self.seeds is None else self.seeds.of_client(k)
        seeds: list[int] | None = None
        for together in self._gathered(steps):
            index, weight = self.index[k : k + 1, together], self.weight[k : k + 1, together]
            x, y = data.inputs(index, dtype), data.targets(index, dtype)
            losses = []
            batches = zip(x.unbind(1), y.unbind(1), weight.unbind(1), strict=True)
            for number, batch in enumerate(batches, together.start):
                if client_seeds is not None:
                    seeds = client_seeds.of_step(number, 1)[:, 0].tolist()
                losses.append(step.on(state, *batch, Step(self.round, number), seeds))
            self._seen[k, together] = torch.cat(losses).double().numpy()

    def _gathered(self, steps: int) -> Iterator[slice]:
        """Which of a client's batches are gathered at once."""
        batch_bytes = self.bench.data.x[:1].nbytes * self.index.shape[2]
        at_once = max(1, GATHERED // max(batch_bytes, 1))
        for start in range(0, steps, at_once):
            yield slice(start, min(start + at_once, steps))

    @property
    def seen(self) -> Floats:
        """See `Steps`."""
        return self._seen


class LayerSteps(AloneSteps):
    """By hand, layer by layer: a client's row stays in the cache meanwhile, as far as it fits."""

    def __init__(self, bench: Bench, path: AlonePath, batches: Batches, round: int) -> None:
        super().__init__(bench, batches, round)
        self.path = path
        targets = bench.data.targets(self.index, bench.dtype)
        self.batch_losses = self.path.losses(targets.flatten(0, 1), self.weight.flatten(0, 1))

    def run(
        self, start: Tensor, numbers: State, kept: Mapping[str, Tensor], present: Tensor
    ) -> Ended:
        """See `Steps`."""
        try:
            return super().run(start, numbers, kept, present)
        finally:
            self.path.leave()

    def _walk(self, state: State, k: int, steps: int) -> None:
        """All steps of client ``k``."""
        bench, algorithm, path, step = self.bench, self.bench.algorithm, self.path, self.bench.step
        assert isinstance(step, LocalStep)  # it is captured on a GPU only
        first_batch = k * self.index.shape[1]
        for together in self._gathered(steps):
            index, start = self.index[k, together], together.start
            for number, x in enumerate(path.features(bench.data.inputs(index, bench.dtype)), start):
                point = algorithm.point(state)
                gradient = path.gradient(point, x, self.batch_losses, first_batch + number)
                step.take(state, gradient, Step(self.round, number))

    @property
    def seen(self) -> Floats:
        """See `Steps`."""
        seen: Floats = self.batch_losses.seen().double().numpy()
        return seen.reshape(self.weight.shape)

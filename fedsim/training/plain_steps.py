"""Local steps on un-noised gradients: the loops that are faster than `StepLoop` on a CPU.

A `SequentialLoop` goes client by client: a client that takes all its steps before the next one
begins keeps its row in the cache, and autograd's parameters are bound to that row once for all
steps. A `ProgramLoop` runs a model program, with the targets of all steps prepared in advance: all
clients of a block at once if their models are small, else client by client too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from fedsim.array_types import Floats
from fedsim.clients.base import State
from fedsim.training.batches import Batches
from fedsim.training.paths.losses import prepare_losses
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.program import Program
from fedsim.training.side_effects import Seeds
from fedsim.training.steps import StepLoop, Stepper

# Bytes of inputs that are gathered at once: those of several batches.
GATHERED = 2**19


def plain_loop(
    stepper: Stepper, batches: Batches, round: int, seeds: Seeds | None = None
) -> StepLoop:
    """The fastest loop over a block's batches; parameters as of `StepLoop`."""
    # On a GPU steps are captured, or limited by launches: the general loop is fastest there.
    if stepper.device.type == "cpu" and stepper.captured_step is None:
        if isinstance(stepper.path, Program):
            return ProgramLoop(stepper, stepper.path, batches, round)
        if isinstance(stepper.path, PlainPath):
            return SequentialLoop(stepper, batches, round, seeds)
    return StepLoop(stepper, batches, round, seeds)


class SequentialLoop(StepLoop):
    """Steps by autograd, one client after another."""

    sequential = True

    def __init__(
        self, stepper: Stepper, batches: Batches, round: int, seeds: Seeds | None = None
    ) -> None:
        super().__init__(stepper, batches, round, seeds)
        self._losses = np.zeros(batches.weight.shape)

    def run_client(self, state: State, k: int, steps: int) -> None:
        """All steps of client ``k``, from ``state`` and in it."""
        stepper, path = self.stepper, self.stepper.path
        assert isinstance(path, PlainPath)
        data, dtype, algorithm = stepper.data, stepper.dtype, stepper.algorithm
        seeds = None if self.seeds is None else self.seeds.of_client(k, steps).tolist()
        # Real examples come first in a batch, then padding, which this path leaves out.
        is_real = self.batches.weight[k, :steps] != 0
        counts = is_real.sum(axis=1).tolist()
        generator = nullcontext() if self.seeds is None else torch.random.fork_rng(devices=[])
        # Bound here once: as long as the algorithm steps in place, `gradient_of_one` finds the
        # parameters bound to this very row, and binds nothing.
        with generator, path.state.restored(), path.bound(algorithm.point(state)):
            for chunk in _step_chunks(self, steps):
                index, weight = self.index[k, chunk], self.weight[k, chunk]
                x, y = data.inputs(index, dtype), data.targets(index, dtype)
                loss = path.loss_of(y)
                losses: list[Tensor] = []
                batches = zip(x.unbind(), y.unbind(), weight.unbind(), strict=True)
                for number, (inputs, targets, weights) in enumerate(batches, chunk.start):
                    if counts[number] < is_real.shape[1]:
                        rows = slice(counts[number])
                        inputs, targets, weights = inputs[rows], targets[rows], weights[rows]
                    if seeds is not None:
                        torch.default_generator.manual_seed(seeds[number])
                    point = algorithm.point(state)
                    gradient, of_step = path.gradient_of_one(point, inputs, targets, weights, loss)
                    stepper.update(state, gradient, self.positions[number])
                    losses.append(of_step)
                self._losses[k, chunk][is_real[chunk]] = torch.cat(losses).to(dtype).numpy()

    @property
    def example_losses(self) -> Floats:
        """Loss of each example, in the shape of the batches' weights."""
        return self._losses


def _step_chunks(loop: StepLoop, steps: int) -> Iterator[slice]:
    """Ranges of a client's batches whose inputs are gathered at once."""
    batch_bytes = loop.stepper.data.x[:1].nbytes * loop.index.shape[2]
    steps_per_call = max(1, GATHERED // max(batch_bytes, 1))
    for start in range(0, steps, steps_per_call):
        yield slice(start, min(start + steps_per_call, steps))


class ProgramLoop(StepLoop):
    """Steps of clients whose model is a program of layers."""

    def __init__(self, stepper: Stepper, path: Program, batches: Batches, round: int) -> None:
        super().__init__(stepper, batches, round)
        self.path, self.sequential = path, path.sequential
        # In the order in which a block takes them: batch number is step * clients + client.
        self._by_step = self.index.transpose(0, 1).contiguous()
        targets = stepper.data.targets(self._by_step.flatten(0, 1), stepper.dtype)
        weights = self.weight.transpose(0, 1).flatten(0, 1)
        self.batch_losses = prepare_losses(path.loss, targets, weights)

    def step(self, state: State, index: int, active: int) -> None:
        """One step of the first ``active`` clients."""
        x = self.stepper.data.inputs(self._by_step[index, :active], self.stepper.dtype)
        self._step(state, x, index, 0)

    def run_client(self, state: State, k: int, steps: int) -> None:
        """All steps of client ``k``, from ``state`` and in it."""
        for chunk in _step_chunks(self, steps):
            inputs = self.stepper.data.inputs(self.index[k, chunk], self.stepper.dtype)
            for number, x in enumerate(torch.split(inputs, 1), chunk.start):
                self._step(state, x, number, k)

    def _step(self, state: State, x: Tensor, number: int, first: int) -> None:
        """One step, on batches ``x [n, B, ...]``, of ``n`` clients from position ``first`` on."""
        stepper, batch = self.stepper, number * self._by_step.shape[1] + first
        point = stepper.algorithm.point(state)
        gradient = self.path.batch_gradient(point, x, self.batch_losses, batch)
        stepper.update(state, gradient, self.positions[number])

    @property
    def example_losses(self) -> Floats:
        """Loss of each example, in the shape of the batches' weights."""
        losses: Floats = self.batch_losses.values().double().numpy()
        return losses.reshape(self._by_step.shape).swapaxes(0, 1)

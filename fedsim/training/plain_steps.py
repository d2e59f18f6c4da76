"""Local steps on gradients as they are: which batches clients draw, and which loop steps them.

There are two loops besides the general one of `Steps`, both for a CPU. `SequentialSteps` go client
by client: one that takes all its steps before the next begins keeps its row in the cache, and by
autograd the model's parameters are views of that row for all of its steps. `ProgramSteps` are those
of a model program, for which the targets of all steps are prepared together: all clients of a
block at once where their models are small, else client by client too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.base import State, Step
from fedsim.randomness import Randomness
from fedsim.rows.packing import empty_rows
from fedsim.training.batches import Batches, Floats, Ints, Workload, plan_batches, width
from fedsim.training.client_state import CarriedState
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.program import Program
from fedsim.training.side_effects import Seeds
from fedsim.training.steps import EndState, RoundClients, Stepper, Steps

# To draw for more clients at once gains nothing; so many examples of steps take a MiB.
MOST_PREFETCHED, PREFETCHED_PLACES = 64, 2**16

# Inputs of so many bytes are gathered at once: those of some batches.
GATHERED = 2**19


@dataclass(frozen=True)
class PlainStepFactory:
    """Batches and steps of clients that do not protect single examples.

    Parameters
    ----------
    stepper : Stepper
    workload : Workload
    draws : bool
        Whether the model draws in training.
    """

    stepper: Stepper
    workload: Workload
    draws: bool
    reports_loss = True

    def prefetched(self, client_ids: Ints, size: int) -> int:
        """How many of these clients, in blocks of ``size``, draw their batches before they begin.

        The first ones, in whole blocks, and no more than there is room for; 0 where each block
        draws when it begins.
        """
        if size >= MOST_PREFETCHED:
            return 0
        client_ids = client_ids[: MOST_PREFETCHED // size * size]
        sizes = [self.stepper.data.size(i) for i in client_ids.tolist()]
        widest = max(width(self.workload.work.batch_size, size) for size in sizes)
        # Each has room for as many steps as another takes.
        most_steps = np.maximum.accumulate(self.workload.steps(client_ids))
        places = most_steps * widest * np.arange(1, len(sizes) + 1)
        fit = int((places <= PREFETCHED_PLACES).sum())
        return fit if fit == len(sizes) else fit // size * size

    def batches(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> Iterator[Batches]:
        """Draw these clients' batches, those of one width together.

        Raises
        ------
        FedsimError
            If a client has an example whose label or token is none.
        """
        self.stepper.data.require_usable(client_ids.tolist())
        counts = self.workload.counts
        return plan_batches(
            self.workload.work,
            [self.stepper.data.indices[i] for i in client_ids],
            client_ids,
            randomness,
            round,
            None if counts is None else counts[client_ids],
        )

    def steps(self, batches: Batches, clients: RoundClients) -> Steps:
        """The steps of the clients whose batches these are, ready to be run."""
        stepper, path = self.stepper, self.stepper.path
        # A GPU's steps are captured, or bound by launches: the general loop is the fastest there.
        on_cpu = stepper.device.type == "cpu"
        if isinstance(path, Program) and on_cpu and stepper.captured is None:
            return ProgramSteps(stepper, path, batches, clients.round)
        seeds = clients.seeds if self.draws else None
        make = SequentialSteps if isinstance(path, PlainPath) and on_cpu else Steps
        return make(stepper, batches, clients.round, seeds)


class SequentialSteps(Steps):
    """Steps of one client after another, by autograd."""

    def __init__(
        self, stepper: Stepper, batches: Batches, round: int, seeds: Seeds | None = None
    ) -> None:
        super().__init__(stepper, batches, round, seeds)
        self._losses = np.zeros(batches.weight.shape)

    def run(self, start: Tensor, numbers: State, carried: CarriedState) -> EndState:
        """All steps of each client; parameters as of `Steps.run`."""
        ends, theta = [], empty_rows(len(start), start.shape[1], start.dtype)
        for k, steps in enumerate(self.batches.steps.tolist()):
            client, row = slice(k, k + 1), theta[k : k + 1]
            # Not all rows are copied at once: the one just written is in the cache.
            own_numbers = {name: values[client] for name, values in numbers.items()}
            state = self.start(row.copy_(start[client]), own_numbers, carried.at(client))
            self._all_steps(state, k, steps)
            end = self.end(state, 0)
            if end.theta.data_ptr() != row.data_ptr():
                row.copy_(end.theta)
            ends.append(end)
        return EndState.joined(ends, theta)

    def _all_steps(self, state: State, k: int, steps: int) -> None:
        """All steps of client ``k``."""
        stepper, path = self.stepper, self.stepper.path
        assert isinstance(path, PlainPath)
        data, dtype, algorithm = stepper.data, stepper.dtype, stepper.algorithm
        seeds = None if self.seeds is None else self.seeds.of_client(k, steps).tolist()
        # Real examples come first.
        is_real = self.batches.weight[k, :steps] != 0
        counts = is_real.sum(axis=1).tolist()
        generator = nullcontext() if self.seeds is None else torch.random.fork_rng(devices=[])
        with generator, path.state.restored(), path.bound(algorithm.point(state)):
            for together in self._gathered(steps):
                index, weight = self.index[k, together], self.weight[k, together]
                x, y = data.inputs(index, dtype), data.targets(index, dtype)
                loss = path.loss_of(y)
                losses: list[Tensor] = []
                batches = zip(x.unbind(), y.unbind(), weight.unbind(), strict=True)
                for number, (inputs, targets, weights) in enumerate(batches, together.start):
                    if counts[number] < is_real.shape[1]:
                        real = slice(counts[number])
                        inputs, targets, weights = inputs[real], targets[real], weights[real]
                    if seeds is not None:
                        torch.default_generator.manual_seed(seeds[number])
                    point = algorithm.point(state)
                    gradient, of_step = path.gradient_of_one(point, inputs, targets, weights, loss)
                    stepper.update(state, gradient, Step(self.round, number))
                    losses.append(of_step)
                self._losses[k, together][is_real[together]] = torch.cat(losses).to(dtype).numpy()

    def _gathered(self, steps: int) -> Iterator[slice]:
        """Which of a client's batches are gathered at once."""
        batch_bytes = self.stepper.data.x[:1].nbytes * self.index.shape[2]
        at_once = max(1, GATHERED // max(batch_bytes, 1))
        for start in range(0, steps, at_once):
            yield slice(start, min(start + at_once, steps))

    @property
    def example_losses(self) -> Floats:
        """Loss of each example, shaped as the batches' weights."""
        return self._losses


class ProgramSteps(SequentialSteps):
    """Steps of clients whose model is a program of layers."""

    def __init__(self, stepper: Stepper, path: Program, batches: Batches, round: int) -> None:
        super().__init__(stepper, batches, round)
        self.path = path
        # Step by step, as a block takes them: batch number is step * clients + client.
        self._by_step = self.index.transpose(0, 1).contiguous()
        targets = stepper.data.targets(self._by_step.flatten(0, 1), stepper.dtype)
        self.batch_losses = path.losses(targets, self.weight.transpose(0, 1).flatten(0, 1))

    def run(self, start: Tensor, numbers: State, carried: CarriedState) -> EndState:
        """All steps of each client; parameters as of `Steps.run`."""
        run = super().run if self.path.sequential else partial(Steps.run, self)
        return run(start, numbers, carried)

    def step(self, state: State, index: int, active: int) -> None:
        """One step of the first ``active`` clients."""
        x = self.stepper.data.inputs(self._by_step[index, :active], self.stepper.dtype)
        self._step(state, x, index, 0)

    def _all_steps(self, state: State, k: int, steps: int) -> None:
        for together in self._gathered(steps):
            inputs = self.stepper.data.inputs(self.index[k, together], self.stepper.dtype)
            for number, x in enumerate(inputs.unbind(0), together.start):
                self._step(state, x[None], number, k)

    def _step(self, state: State, x: Tensor, number: int, first: int) -> None:
        """A step of as many clients as there are batches ``x [n, B, ...]``, from one on."""
        stepper, batch = self.stepper, number * self._by_step.shape[1] + first
        point = stepper.algorithm.point(state)
        gradient = self.path.gradient_of(point, x, self.batch_losses, batch)
        stepper.update(state, gradient, Step(self.round, number))

    @property
    def example_losses(self) -> Floats:
        """Loss of each example, shaped as the batches' weights."""
        losses: Floats = self.batch_losses.values().double().numpy()
        return losses.reshape(self._by_step.shape).swapaxes(0, 1)

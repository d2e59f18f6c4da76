"""Local steps on un-noised gradients: the batches that clients draw, and the loops over steps.

Besides the general loop of `Steps` there are two, both for a CPU. `SequentialSteps` go client by
client: a client that takes all its steps before the next one begins keeps its row in the cache, and
autograd's parameters are bound to that row once for all steps. `ProgramSteps` run a model program,
with the targets of all steps prepared in advance: all clients of a block at once if their models
are small, else client by client too.
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

# Most clients that draw batches ahead (more gain nothing), and most batch entries (a MiB).
MOST_PREFETCHED, PREFETCHED_PLACES = 64, 2**16

# Bytes of inputs that are gathered at once: those of several batches.
GATHERED = 2**19


@dataclass(frozen=True)
class PlainStepFactory:
    """Makes the batches and steps of clients without example-level privacy.

    Parameters
    ----------
    stepper : Stepper
    workload : Workload
    draws : bool
        Whether the model draws random numbers in training.
    """

    stepper: Stepper
    workload: Workload
    draws: bool
    reports_loss = True

    def prefetched(self, client_ids: Ints, size: int) -> int:
        """How many of the first clients draw their batches ahead, before their block's turn.

        Whole blocks of ``size`` clients, or all, as many as fit into `PREFETCHED_PLACES`; 0 if each
        block draws when it begins.
        """
        if size >= MOST_PREFETCHED:
            return 0
        client_ids = client_ids[: MOST_PREFETCHED // size * size]
        sizes = [self.stepper.data.size(i) for i in client_ids.tolist()]
        widest = max(width(self.workload.work.batch_size, size) for size in sizes)
        # Arrays are padded to the steps of the client that takes most.
        most_steps = np.maximum.accumulate(self.workload.steps(client_ids))
        places = most_steps * widest * np.arange(1, len(sizes) + 1)
        fit = int((places <= PREFETCHED_PLACES).sum())
        return fit if fit == len(sizes) else fit // size * size

    def batches(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> Iterator[Batches]:
        """Draw these clients' batches, grouped by physical width.

        Raises
        ------
        FedsimError
            If a client has an example with an invalid label or token.
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
        """The loop over these clients' batches, ready to run."""
        stepper, path = self.stepper, self.stepper.path
        # On a GPU steps are captured, or limited by launches: the general loop is fastest there.
        on_cpu = stepper.device.type == "cpu"
        if isinstance(path, Program) and on_cpu and stepper.captured is None:
            return ProgramSteps(stepper, path, batches, clients.round)
        seeds = clients.seeds if self.draws else None
        make = SequentialSteps if isinstance(path, PlainPath) and on_cpu else Steps
        return make(stepper, batches, clients.round, seeds)


class SequentialSteps(Steps):
    """Steps by autograd, one client after another."""

    def __init__(
        self, stepper: Stepper, batches: Batches, round: int, seeds: Seeds | None = None
    ) -> None:
        super().__init__(stepper, batches, round, seeds)
        self._losses = np.zeros(batches.weight.shape)

    def run(self, start: Tensor, numbers: State, carried: CarriedState) -> EndState:
        """Run all steps of all clients; parameters as in `Steps.run`."""
        ends, theta = [], empty_rows(len(start), start.shape[1], start.dtype)
        for k, steps in enumerate(self.batches.steps.tolist()):
            client, row = slice(k, k + 1), theta[k : k + 1]
            # Copied here, not for all clients at once: the row just written is in the cache.
            own_numbers = {name: values[client] for name, values in numbers.items()}
            state = self.start(row.copy_(start[client]), own_numbers, carried.at(client))
            self._all_steps(state, k, steps)
            end = self.end(state, 0)
            if end.theta.data_ptr() != row.data_ptr():
                row.copy_(end.theta)
            ends.append(end)
        return EndState.joined(ends, theta)

    def _all_steps(self, state: State, k: int, steps: int) -> None:
        """Take all steps of client ``k``, from ``state`` and in it."""
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
            for chunk in self._step_chunks(steps):
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
                    stepper.update(state, gradient, Step(self.round, number))
                    losses.append(of_step)
                self._losses[k, chunk][is_real[chunk]] = torch.cat(losses).to(dtype).numpy()

    def _step_chunks(self, steps: int) -> Iterator[slice]:
        """Ranges of a client's batches whose inputs are gathered at once."""
        batch_bytes = self.stepper.data.x[:1].nbytes * self.index.shape[2]
        steps_per_call = max(1, GATHERED // max(batch_bytes, 1))
        for start in range(0, steps, steps_per_call):
            yield slice(start, min(start + steps_per_call, steps))

    @property
    def example_losses(self) -> Floats:
        """Loss of each example, in the shape of the batches' weights."""
        return self._losses


class ProgramSteps(SequentialSteps):
    """Steps of clients whose model is a program of layers."""

    def __init__(self, stepper: Stepper, path: Program, batches: Batches, round: int) -> None:
        super().__init__(stepper, batches, round)
        self.path = path
        # In the order in which a block takes them: batch number is step * clients + client.
        self._by_step = self.index.transpose(0, 1).contiguous()
        targets = stepper.data.targets(self._by_step.flatten(0, 1), stepper.dtype)
        self.batch_losses = path.losses(targets, self.weight.transpose(0, 1).flatten(0, 1))

    def run(self, start: Tensor, numbers: State, carried: CarriedState) -> EndState:
        """Run all steps of all clients; parameters as in `Steps.run`."""
        run = super().run if self.path.sequential else partial(Steps.run, self)
        return run(start, numbers, carried)

    def step(self, state: State, index: int, active: int) -> None:
        """One step of the first ``active`` clients."""
        x = self.stepper.data.inputs(self._by_step[index, :active], self.stepper.dtype)
        self._step(state, x, index, 0)

    def _all_steps(self, state: State, k: int, steps: int) -> None:
        for chunk in self._step_chunks(steps):
            inputs = self.stepper.data.inputs(self.index[k, chunk], self.stepper.dtype)
            for number, x in enumerate(inputs.unbind(0), chunk.start):
                self._step(state, x[None], number, k)

    def _step(self, state: State, x: Tensor, number: int, first: int) -> None:
        """One step, on batches ``x [n, B, ...]``, of ``n`` clients from position ``first`` on."""
        stepper, batch = self.stepper, number * self._by_step.shape[1] + first
        point = stepper.algorithm.point(state)
        gradient = self.path.gradient_of(point, x, self.batch_losses, batch)
        stepper.update(state, gradient, Step(self.round, number))

    @property
    def example_losses(self) -> Floats:
        """Loss of each example, in the shape of the batches' weights."""
        losses: Floats = self.batch_losses.values().double().numpy()
        return losses.reshape(self._by_step.shape).swapaxes(0, 1)

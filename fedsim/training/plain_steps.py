"""Local steps on gradients as they are: which batches clients draw, and which loop steps them.

There are three loops besides the general one of `Steps`, all for a CPU. `BlockSteps` is for small
dense models: all clients of a block at once, with the targets of all steps prepared together. The
other two go client by client: `SequentialSteps` by autograd, where the model's parameters are views
of the client's row for all of its steps, and `LayeredSteps` by layers written out by hand. A client
that takes all its steps before the next begins keeps its row in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.base import State, Step
from fedsim.randomness import Randomness
from fedsim.rows.packing import empty_rows
from fedsim.training.batches import Batches, Ints, plan_batches, width
from fedsim.training.paths.choice import Path
from fedsim.training.paths.layered import LayeredPath, OneClientPath
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.stacked import StackedPath
from fedsim.training.round_clients import RoundClients
from fedsim.training.side_effects import Seeds
from fedsim.training.steps import EndState, Floats, Stepper, Steps
from fedsim.training.workload import Workload

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
        return plan_batches(
            self.workload.work,
            [self.stepper.data.indices[i] for i in client_ids],
            client_ids,
            randomness,
            round,
            self.workload.counts_of(client_ids),
        )

    def steps(self, batches: Batches, clients: RoundClients) -> Steps:
        """The steps of the clients whose batches these are, ready to be run."""
        stepper, path = self.stepper, self.stepper.path
        if self._one_client_path is not None:
            return LayeredSteps(stepper, self._one_client_path, batches, clients.round)
        # A GPU's steps are captured, or bound by launches: the general loop is the fastest there.
        on_cpu = stepper.device.type == "cpu"
        if isinstance(path, StackedPath) and on_cpu and stepper.captured is None:
            return BlockSteps(stepper, path, batches, clients.round)
        seeds = clients.seeds if self.draws else None
        make = SequentialSteps if isinstance(path, PlainPath) and on_cpu else Steps
        return make(stepper, batches, clients.round, seeds)

    @cached_property
    def _one_client_path(self) -> OneClientPath | None:
        """The path of clients that go one after another, layer by layer."""
        path: Path = self.stepper.path
        if isinstance(path, StackedPath) and path.sequential:
            return OneClientPath(path)
        if isinstance(path, LayeredPath) and self.stepper.device.type == "cpu":
            return path.one_client
        return None


class BlockSteps(Steps):
    """Steps of a block of clients with small dense models: targets are prepared once for all."""

    def __init__(self, stepper: Stepper, path: StackedPath, batches: Batches, round: int) -> None:
        super().__init__(stepper, batches, round)
        self.path = path
        # Step by step, as they are taken.
        self._index = self.index.transpose(0, 1).contiguous()
        targets = stepper.data.targets(self._index.flatten(0, 1), stepper.dtype)
        self.batch_losses = path.losses(targets, self.weight.transpose(0, 1).flatten(0, 1))

    def step(self, state: State, index: int, active: int) -> None:
        """One step of the first ``active`` clients."""
        stepper, examples = self.stepper, self._index[index]
        x = stepper.data.inputs(examples[:active], stepper.dtype)
        point, first = stepper.algorithm.point(state), index * examples.shape[0]
        gradient = self.path.gradient_of(point, x, self.batch_losses, first)
        stepper.update(state, gradient, Step(self.round, index))

    @property
    def example_losses(self) -> Floats:
        """Loss of each example, shaped as the batches' weights."""
        losses: Floats = self.batch_losses.values().double().numpy()
        return losses.reshape(self._index.shape).swapaxes(0, 1)


class SequentialSteps(Steps):
    """Steps of one client after another, by autograd."""

    def __init__(
        self, stepper: Stepper, batches: Batches, round: int, seeds: Seeds | None = None
    ) -> None:
        super().__init__(stepper, batches, round, seeds)
        self._losses = np.zeros(batches.weight.shape)

    def run(
        self, start: Tensor, numbers: State, carried: Mapping[str, Tensor], present: Tensor
    ) -> EndState:
        """All steps of each client; parameters as of `Steps.run`."""
        ends, theta = [], empty_rows(len(start), start.shape[1], start.dtype)
        for k, steps in enumerate(self.batches.steps.tolist()):
            client, row = slice(k, k + 1), theta[k : k + 1]
            # Not all rows are copied at once: the one just written is in the cache.
            state = self.start(
                row.copy_(start[client]),
                {name: values[client] for name, values in numbers.items()},
                {name: values[client] for name, values in carried.items()},
                present[client],
            )
            with self.stepper.bound(self.stepper.algorithm.point(state)):
                self._all_steps(state, k, steps)
            end = self.end(state, 0)
            if end.theta.data_ptr() != row.data_ptr():
                row.copy_(end.theta)
            ends.append(end)
        return EndState.joined(ends, theta)

    def _all_steps(self, state: State, k: int, steps: int) -> None:
        """All steps of client ``k``."""
        data, dtype = self.stepper.data, self.stepper.dtype
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
                at = Step(self.round, number)
                losses.append(self.stepper.on_examples(state, *batch, at, seeds))
            self._losses[k, together] = torch.cat(losses).double().numpy()

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


class LayeredSteps(SequentialSteps):
    """Steps of one client after another, by layers written out by hand."""

    def __init__(self, stepper: Stepper, path: OneClientPath, batches: Batches, round: int) -> None:
        super().__init__(stepper, batches, round)
        self.path = path
        targets = stepper.data.targets(self.index, stepper.dtype)
        self.batch_losses = self.path.losses(targets.flatten(0, 1), self.weight.flatten(0, 1))

    def run(
        self, start: Tensor, numbers: State, carried: Mapping[str, Tensor], present: Tensor
    ) -> EndState:
        """All steps of each client; parameters as of `Steps.run`."""
        try:
            return super().run(start, numbers, carried, present)
        finally:
            self.path.forget()

    def _all_steps(self, state: State, k: int, steps: int) -> None:
        stepper, path = self.stepper, self.path
        first_batch = k * self.index.shape[1]
        for together in self._gathered(steps):
            inputs = stepper.data.inputs(self.index[k, together], stepper.dtype)
            for number, x in enumerate(path.features(inputs), together.start):
                point = stepper.algorithm.point(state)
                gradient = path.gradient(point, x, self.batch_losses, first_batch + number)
                stepper.update(state, gradient, Step(self.round, number))

    @property
    def example_losses(self) -> Floats:
        """Loss of each example, shaped as the batches' weights."""
        losses: Floats = self.batch_losses.values().double().numpy()
        return losses.reshape(self.weight.shape)

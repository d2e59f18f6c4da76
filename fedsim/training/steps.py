"""What clients start a round with, and the loop over their local steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.array_types import Floats, Ints
from fedsim.clients.base import Gradient, LocalAlgorithm, State, Step
from fedsim.randomness import Randomness
from fedsim.rows.packing import Packing, empty_rows
from fedsim.training.batches import Batches
from fedsim.training.client_state import CarriedState
from fedsim.training.data import ClientData
from fedsim.training.paths.dropout import DropoutPath
from fedsim.training.paths.masks import with_masks
from fedsim.training.paths.path_choice import Path
from fedsim.training.paths.plain import PlainPath
from fedsim.training.side_effects import Seeds, reproducible_arithmetic

DROPOUT_KEY, DROPOUT_COUNTER = "dropout.key", "dropout.counter"


@dataclass(frozen=True)
class RoundClients:
    """``n`` clients at the start of a round.

    Attributes
    ----------
    client_ids : int64 ``[n]``
    round : int
    randomness : sequence of n Randomness
        Source of each client's random draws.
    carried : CarriedState
        Their state from earlier rounds.
    batches : Batches or None
        Their batches, if they draw these before their block begins.
    """

    client_ids: Ints
    round: int
    randomness: Sequence[Randomness]
    carried: CarriedState
    batches: Batches | None = None

    def __len__(self) -> int:
        return len(self.client_ids)

    @property
    def seeds(self) -> Seeds:
        """Seeds of the models' own random draws (dropout) in the round."""
        return Seeds(self.randomness, self.client_ids, self.round)


@dataclass
class Stepper:
    """Makes a step of any of a trainer's clients: gathers batches, takes gradients, updates states.

    Attributes
    ----------
    path : Path
    data : ClientData
    algorithm : LocalAlgorithm
    packing : Packing
    carried : tuple of str
        Entries of the algorithm's state that are kept between rounds.
    max_norm : float
        Largest L2 norm of a batch's gradient; longer ones are scaled down to it. 0 for no limit.
    statistics : int64 Tensor ``[s]``, optional
        Positions in a packed row of batch statistics: the model itself writes them when it runs,
        and no update rule (weight decay, a proximal term) may change them.
    captured_step : callable, optional
        Does what `step_eagerly` does by CUDA graphs: `fedsim.training.graphs.StepGraphs`. Of
        clients with example-level privacy it makes the private step.
    tf32 : bool
        Whether a GPU rounds the factors of float32 products to ten bits of mantissa.
    """

    path: Path
    data: ClientData
    algorithm: LocalAlgorithm
    packing: Packing
    carried_entries: tuple[str, ...] = ()
    max_norm: float = 0.0
    statistics: Tensor | None = None
    captured_step: Callable[[State, Tensor, Tensor, Step], Tensor] | None = None
    tf32: bool = False

    @property
    def device(self) -> torch.device:
        """The device that trains."""
        return self.data.x.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.packing.layout.dtype

    def step_eagerly(
        self,
        state: State,
        index: Tensor,
        weight: Tensor,
        at: Step,
        seeds: Sequence[int] | None = None,
    ) -> Tensor:
        """Update the state of ``n`` clients, operation by operation.

        Parameters
        ----------
        state : State
        index : int64 Tensor ``[n, B]``
            Indices of each client's examples.
        weight : Tensor ``[n, B]``
            Weight of each example's loss; 0 on padding.
        at : Step
        seeds : sequence of n ints, optional
            Seeds of the model's own random draws for each client; on the plain path only.

        Returns
        -------
        Tensor ``[n, B]``
            Loss of each example, unweighted.
        """
        x, y = self.inputs(state, index, at), self.data.targets(index, self.dtype)
        point = self.algorithm.point(state)
        if seeds is None:
            gradient, losses = self.path.gradient(point, x, y, weight)
        else:
            assert isinstance(self.path, PlainPath)
            gradient, losses = self.path.gradient(point, x, y, weight, seeds)
        self.update(state, gradient, at)
        return losses

    def inputs(self, state: State, index: Tensor, at: Step, chunk: int = 0) -> Tensor:
        """Inputs ``[n, B, ...]`` of examples; with masks of dropout, if the step draws them."""
        x = self.data.inputs(index, self.dtype)
        if isinstance(self.path, DropoutPath):
            counter = counter_of_step(state[DROPOUT_COUNTER], at)
            x = with_masks(self.path.model, x, state[DROPOUT_KEY], counter, self.dtype, chunk)
        return x

    def update(self, state: State, gradient: Gradient, at: Step) -> None:
        """Update the state by these gradients, scaled down to `max_norm` where that is set."""
        if self.max_norm:
            # The same formula as torch.nn.utils.clip_grad_norm_.
            gradient = gradient.scaled((self.max_norm / (gradient.norms() + 1e-6)).clamp_(max=1.0))
        if self.statistics is None:
            self.algorithm.step(state, gradient, at)
            return
        # The forward pass has just written them: the algorithm's step must leave them unchanged.
        statistics = state["theta"][:, self.statistics]
        self.algorithm.step(state, gradient, at)
        state["theta"][:, self.statistics] = statistics


def counter_of_step(counter: Tensor, at: Step) -> Tensor:
    """Counters ``[n, 3]`` of a step's draws, given those of the first step's (`Randomness`)."""
    number = at.number(_step_number)
    steps = number.long() if torch.is_tensor(number) else int(number)
    return torch.cat([counter[:, :1] + steps, counter[:, 1:]], dim=1)


def _step_number(at: Step) -> float:
    return at.index


@dataclass(frozen=True)
class StepLoopResult:
    """Results of clients' local steps.

    Attributes
    ----------
    theta : Tensor ``[n, D]``
    reports : dict of str to Tensor ``[n]``
    carried : dict of str to Tensor ``[n, ...]``
        State to keep for the next round.
    sent : dict of str to Tensor ``[n, D]`` or ``[n, 1]``
        Named vectors that are sent in addition to updates.
    """

    theta: Tensor
    reports: dict[str, Tensor]
    carried: dict[str, Tensor]
    sent: dict[str, Tensor]

    def clone(self) -> StepLoopResult:
        """A copy in memory of its own."""
        return StepLoopResult(
            self.theta.clone(),
            *(
                {name: rows.clone() for name, rows in named.items()}
                for named in (self.reports, self.carried, self.sent)
            ),
        )

    @classmethod
    def concatenate(
        cls, groups: list[StepLoopResult], theta: Tensor | None = None
    ) -> StepLoopResult:
        """Join groups of clients, in their order; give ``theta`` if its rows are joined already."""
        if len(groups) == 1:
            return groups[0]
        first = groups[0]
        return cls(
            torch.cat([group.theta for group in groups]) if theta is None else theta,
            {k: torch.cat([group.reports[k] for group in groups]) for k in first.reports},
            {k: torch.cat([group.carried[k] for group in groups]) for k in first.carried},
            {k: torch.cat([group.sent[k] for group in groups]) for k in first.sent},
        )


class StepLoop:
    """Loop over the local steps of a block's ``n`` clients.

    Parameters
    ----------
    stepper : Stepper
    batches : Batches
    round : int
    seeds : Seeds, optional
        Seeds of the model's own random draws, if it makes any.

    Attributes
    ----------
    sequential : bool
        Whether clients go one by one, each with all its steps, and not together step by step.
    """

    sequential = False

    def __init__(
        self, stepper: Stepper, batches: Batches, round: int, seeds: Seeds | None = None
    ) -> None:
        self.stepper, self.batches, self.round, self.seeds = stepper, batches, round, seeds
        self.index = torch.from_numpy(batches.index).to(stepper.device)
        self.weight = torch.from_numpy(batches.weight).to(stepper.device, stepper.dtype)
        # Made once: clients that go one by one come to the same steps again and again.
        self.positions = [Step(round, index) for index in range(batches.index.shape[1])]
        self.losses: list[Tensor] = []
        self.draws: State = {}
        """Entries of the state from which masks of dropout are drawn in the step."""
        if seeds is not None and isinstance(stepper.path, DropoutPath):
            key, counter = seeds.counters(batches.steps, stepper.device)
            self.seeds, self.draws = None, {DROPOUT_KEY: key, DROPOUT_COUNTER: counter}

    def run(self, start: Tensor, numbers: State, carried: CarriedState) -> StepLoopResult:
        """Run all steps, from packed parameters ``start [n, D]`` (perhaps one expanded row).

        State ``carried`` from earlier rounds replaces entries of the initial state.
        """
        if self.sequential:
            return self._run_one_by_one(start, numbers, carried)
        steps = self.batches.steps
        state = self.init_state(start.clone(), numbers, carried)
        active = len(steps)
        groups: list[StepLoopResult] = []
        with reproducible_arithmetic(self.stepper.device, tf32=self.stepper.tf32):
            for index in range(int(steps[0])):
                remaining = int((steps > index).sum())
                if remaining < active:
                    # Clients without further steps are the last rows: they end here.
                    groups.append(
                        self.results({k: v[remaining:] for k, v in state.items()}, remaining)
                    )
                    state = {k: v[:remaining] for k, v in state.items()}
                    active = remaining
                self.step(state, index, active)
        groups.append(self.results(state, 0))
        groups.reverse()  # those with most steps come first, and end last
        return StepLoopResult.concatenate(groups)

    def _run_one_by_one(
        self, start: Tensor, numbers: State, carried: CarriedState
    ) -> StepLoopResult:
        results, theta = [], empty_rows(len(start), start.shape[1], start.dtype)
        for k, steps in enumerate(self.batches.steps.tolist()):
            client, row = slice(k, k + 1), theta[k : k + 1]
            # Copied here, not for all clients at once: the row just written is in the cache.
            own_numbers = {name: values[client] for name, values in numbers.items()}
            state = self.init_state(row.copy_(start[client]), own_numbers, carried.select(client))
            self.run_client(state, k, steps)
            result = self.results(state, 0)
            if result.theta.data_ptr() != row.data_ptr():
                row.copy_(result.theta)
            results.append(result)
        return StepLoopResult.concatenate(results, theta)

    def init_state(self, theta: Tensor, numbers: State, carried: CarriedState) -> State:
        """The initial state; parameters as in `run`."""
        state = self.stepper.algorithm.init(theta, numbers)
        for name in self.stepper.carried_entries:
            if name in state:
                state[name] = carried.entry(name, default=state[name])
        return state | self.draws

    def step(self, state: State, index: int, active: int) -> None:
        """One step of the first ``active`` clients."""
        examples, weight = self.index[:active, index], self.weight[:active, index]
        at, captured = self.positions[index], self.stepper.captured_step
        if captured is not None and self.seeds is None:
            losses = captured(state, examples, weight, at)
        else:
            seeds = None if self.seeds is None else self.seeds.of_step(index, active)[:, 0].tolist()
            losses = self.stepper.step_eagerly(state, examples, weight, at, seeds)
        self.losses.append(losses)

    def run_client(self, state: State, k: int, steps: int) -> None:
        """All steps of client ``k``, from ``state`` and in it; of a loop that is `sequential`."""
        raise NotImplementedError

    def results(self, state: State, first: int) -> StepLoopResult:
        """Results of the clients from position ``first`` on, whose rows ``state`` has."""
        algorithm = self.stepper.algorithm
        theta = algorithm.finish(state)
        carried = {name: state[name] for name in self.stepper.carried_entries if name in state}
        result = StepLoopResult(theta, algorithm.report(state), carried, algorithm.send(state))
        # Later captured steps overwrite the buffers that hold these results.
        return result if self.stepper.captured_step is None else result.clone()

    @property
    def example_losses(self) -> Floats:
        """Unweighted loss of each example of the steps taken, in the shape of batches' weights."""
        result = np.zeros(self.batches.weight.shape)
        # One transfer from a GPU, not one per step.
        values = torch.cat([losses.flatten() for losses in self.losses]).double().cpu().numpy()
        for index, losses in enumerate(self.losses):
            of_step, values = values[: losses.numel()], values[losses.numel() :]
            # A private step leaves out chunks at the end that are empty for all clients.
            of_clients = of_step.reshape(len(losses), -1)
            active = result[: len(losses), index].reshape(len(losses), -1)
            active[:, : of_clients.shape[1]] = of_clients
        return result

    def mean_losses(self) -> Floats:
        """Mean over each client's steps of its batch's mean loss, ``[n]``."""
        steps = self.batches.steps
        by_step = (*self.batches.weight.shape[:2], -1)
        weight = self.batches.weight.reshape(by_step)
        sums = (self.example_losses.reshape(by_step) * weight).sum(axis=2)
        means = sums / np.maximum(weight.sum(axis=2), 1)
        total = np.zeros(len(steps))
        for count in set(steps.tolist()):
            rows = steps == count
            # Summed over exactly its own steps: a client's bytes do not depend on its block.
            total[rows] = np.ascontiguousarray(means[rows, :count]).sum(axis=1) / max(count, 1)
        return total

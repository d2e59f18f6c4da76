"""The loop over local steps, for clients whose batches have one width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm, State, Step
from fedsim.clients.gradients import Dense, Gradient
from fedsim.mechanisms import Mechanism, NoiseSource, Releaser
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose
from fedsim.rows.packing import Packing
from fedsim.training.batches import Batches
from fedsim.training.data import ClientData
from fedsim.training.entering import Entering
from fedsim.training.exact_arithmetic import exact
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.graphs import StepGraphs
from fedsim.training.hidden_draws import Seeds
from fedsim.training.local_step import LocalStep
from fedsim.training.paths.examples import ExampleRows

__all__ = ["Bench", "Ended", "PrivateSteps", "Steps"]

Floats = npt.NDArray[np.float64]
MECHANISM = "mechanism."


@dataclass
class Bench:
    """What local steps are made with, the same for all of a trainer's clients.

    Attributes
    ----------
    step : LocalStep or StepGraphs
        Makes a step without privacy; another may take its place between rounds.
    algorithm, data, packing
    carried : tuple of str
        Entries of the algorithm's state that outlive a round.
    """

    step: LocalStep | StepGraphs
    algorithm: LocalAlgorithm
    data: ClientData
    packing: Packing
    carried: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """Where steps are made."""
        return self.data.x.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.packing.layout.dtype


@dataclass(frozen=True)
class Ended:
    """Where clients end.

    Attributes
    ----------
    theta : Tensor ``[n, D]``
    reports : dict of str to Tensor ``[n]``
    carried : dict of str to Tensor ``[n, ...]``
        What they keep for the next round.
    sent : dict of str to Tensor ``[n, D]`` or ``[n, 1]``
        Vectors beside their updates.
    """

    theta: Tensor
    reports: dict[str, Tensor]
    carried: dict[str, Tensor]
    sent: dict[str, Tensor]

    def clone(self) -> Ended:
        """A copy."""
        copied = [
            {name: rows.clone() for name, rows in named.items()}
            for named in (self.reports, self.carried, self.sent)
        ]
        return Ended(self.theta.clone(), *copied)

    @classmethod
    def joined(cls, groups: list[Ended], theta: Tensor | None = None) -> Ended:
        """Of all clients, in the order of the parts; ``theta`` where it is joined already."""
        if len(groups) == 1:
            return groups[0]
        first = groups[0]
        return cls(
            torch.cat([ended.theta for ended in groups]) if theta is None else theta,
            {k: torch.cat([ended.reports[k] for ended in groups]) for k in first.reports},
            {k: torch.cat([ended.carried[k] for ended in groups]) for k in first.carried},
            {k: torch.cat([ended.sent[k] for ended in groups]) for k in first.sent},
        )


class Steps:
    """Local steps of ``n`` clients, those with most steps first.

    Parameters
    ----------
    bench : Bench
    batches : Batches
    round : int
    seeds : Seeds, optional
        Of what the model draws, if it draws.
    """

    def __init__(
        self, bench: Bench, batches: Batches, round: int, seeds: Seeds | None = None
    ) -> None:
        self.bench, self.batches, self.round, self.seeds = bench, batches, round, seeds
        self.index = torch.from_numpy(batches.index).to(bench.device)
        self.weight = torch.from_numpy(batches.weight).to(bench.device, bench.dtype)
        self.losses: list[Tensor] = []

    def run(
        self, start: Tensor, numbers: State, kept: Mapping[str, Tensor], present: Tensor
    ) -> Ended:
        """All steps, from packed parameters ``start [n, D]``, perhaps one row for all.

        ``kept`` replaces the entries of the initial state of those clients that are ``present
        [n]``.
        """
        steps = self.batches.steps
        state = self.start(start.clone(), numbers, kept, present)
        active = len(steps)
        ended: list[Ended] = []
        with exact(self.bench.device):
            for index in range(int(steps[0])):
                still = int((steps > index).sum())
                if still < active:
                    ended.append(self._end({k: v[still:] for k, v in state.items()}, still))
                    state = {k: v[:still] for k, v in state.items()}
                    active = still
                self.step(state, index, active)
        ended.append(self._end(state, 0))
        ended.reverse()  # those with most steps come first, and end last
        return Ended.joined(ended)

    def start(
        self, theta: Tensor, numbers: State, kept: Mapping[str, Tensor], present: Tensor
    ) -> State:
        """Where steps start; parameters as of `run`."""
        state = self.bench.algorithm.init(theta, numbers)
        for name in self.bench.carried:
            if name in kept and name in state:
                mask = present.view(-1, *[1] * (state[name].dim() - 1))
                state[name] = torch.where(mask, kept[name].to(state[name]), state[name])
        return state

    def step(self, state: State, index: int, active: int) -> None:
        """One step of the first ``active`` clients."""
        examples, weight = self.index[:active, index], self.weight[:active, index]
        seeds = None if self.seeds is None else self.seeds.of_step(index, active)[:, 0].tolist()
        self.losses.append(self.bench.step(state, examples, weight, Step(self.round, index), seeds))

    def _end(self, state: State, first: int) -> Ended:
        algorithm = self.bench.algorithm
        theta = algorithm.finish(state)
        carried = {name: state[name] for name in self.bench.carried if name in state}
        carried |= self.mechanism_state(first, theta)
        ended = Ended(theta, algorithm.report(state), carried, algorithm.send(state))
        # Captured steps go on writing where this lies.
        return ended.clone() if isinstance(self.bench.step, StepGraphs) else ended

    def mechanism_state(self, first: int, theta: Tensor) -> dict[str, Tensor]:
        """State of the mechanism of the clients that end, from position ``first``."""
        return {}

    @property
    def seen(self) -> Floats:
        """Loss of each example of the steps taken, shaped as the batches' weights; unweighted."""
        seen = np.zeros(self.batches.weight.shape)
        # A GPU is asked once, not once a step.
        values = torch.cat([losses.flatten() for losses in self.losses]).double().cpu().numpy()
        for index, losses in enumerate(self.losses):
            of_step, values = values[: losses.numel()], values[losses.numel() :]
            active = seen[: len(losses), index]
            active[:] = of_step.reshape(active.shape)
        return seen

    def mean_losses(self) -> Floats:
        """Mean over each client's steps of its batch's mean loss, ``[n]``."""
        steps = self.batches.steps
        by_step = (*self.batches.weight.shape[:2], -1)
        weight = self.batches.weight.reshape(by_step)
        sums = (self.seen.reshape(by_step) * weight).sum(axis=2)
        means = sums / np.maximum(weight.sum(axis=2), 1)
        total = np.zeros(len(steps))
        for count in set(steps.tolist()):
            alike = steps == count
            # Row by row in numpy, over its own steps: the same bytes whoever shares the block.
            total[alike] = np.ascontiguousarray(means[alike, :count]).sum(axis=1) / max(count, 1)
        return total


class PrivateSteps(Steps):
    """Steps on gradients that are noisy sums of bounded per-example gradients.

    Who is in a batch and the noise are drawn on the host; whatever follows from the examples
    stays on the device.

    Parameters
    ----------
    bench, batches, round, seeds : as `Steps`
        The batches have a chunk axis.
    privacy : ExamplePrivacy
    rows : ExampleRows
        Gives the gradients of single examples.
    plans : sequence of n ReleasePlan
        What each client's sums are divided by.
    entering : Entering
        Whose noise is drawn, and what they have from earlier rounds.
    keeps_state : bool
        Whether the mechanism's state is among that, and goes on to the next round.
    """

    def __init__(
        self,
        bench: Bench,
        batches: Batches,
        round: int,
        seeds: Seeds | None = None,
        *,
        privacy: ExamplePrivacy,
        rows: ExampleRows,
        plans: Sequence[ReleasePlan[Mechanism]],
        entering: Entering,
        keeps_state: bool,
    ) -> None:
        super().__init__(bench, batches, round, seeds)
        self.rows, self.keeps_state = rows, keeps_state
        layout = bench.packing.layout
        self.counts = (batches.weight > 0).sum(axis=3)
        self.usable = self.weight > 0
        if (unusable := bench.data.unusable) is not None:  # their gradients count as zero
            self.usable &= torch.from_numpy(~unusable[batches.index]).to(bench.device)
        self.noise = [
            NoiseSource(
                source.generator(Purpose.NOISE, level="example", round=round, client=client),
                privacy.hardened,
            )
            for client, source in zip(
                entering.client_ids.tolist(), entering.randomness, strict=True
            )
        ]
        kept = entering.kept.rows
        there = torch.from_numpy(entering.kept.present & keeps_state).to(bench.device)
        self.state: dict[str, Tensor] = {}
        """The mechanism's, of the clients that were active last."""
        for name, first in privacy.mechanism.init(layout).items():
            start = first.to(bench.device).expand(len(entering), *first.shape)
            if MECHANISM + name in kept:
                kept_state = kept[MECHANISM + name].to(start)
                start = torch.where(there.view(-1, *[1] * first.dim()), kept_state, start)
            self.state[name] = start
        self.releaser = Releaser(plans, layout, device=bench.device, exact=False)

    def step(self, state: State, index: int, active: int) -> None:
        """See `Steps`."""
        algorithm = self.bench.algorithm
        gradient = self.gradient(algorithm.point(state), index, active)
        algorithm.step(state, gradient, Step(self.round, index))

    def gradient(self, point: Tensor, index: int, active: int) -> Gradient:
        """Of the first ``active`` clients, released by the mechanism."""
        data = self.bench.data
        total = self.releaser.start({k: v[:active] for k, v in self.state.items()}, active)
        losses = torch.zeros_like(self.weight[:active, index])
        chunks = self.index.shape[2]
        seeds = None if self.seeds is None else self.seeds.of_step(index, active, chunks).T.tolist()
        for chunk in range(chunks):
            counts = self.counts[:active, index, chunk]
            if not counts.any():
                continue
            asked = self.index[:active, index, chunk]
            usable = self.usable[:active, index, chunk].double()
            x, y = (
                data.inputs(asked, self.bench.dtype),
                data.targets(asked, self.bench.dtype),
            )
            for examples in self.rows(point, x, y, counts.tolist(), seeds and seeds[chunk]):
                clients, b = examples.clients, examples.rows.count
                losses[clients, chunk, :b] = examples.losses
                weights = usable[clients, :b]
                total.add_owners(examples.rows, weights, examples.counts, clients)
        self.losses.append(losses.flatten(1))
        release = self.releaser.release(total, *self.noise[:active])
        self.state = dict(release.state)
        return Dense(self.bench.packing.pack(release.mean))

    def mechanism_state(self, first: int, theta: Tensor) -> dict[str, Tensor]:
        """See `Steps`."""
        if not self.keeps_state:
            return {}
        clients = slice(first, first + len(theta))
        return {MECHANISM + name: tensor[clients] for name, tensor in self.state.items()}

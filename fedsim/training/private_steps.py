"""Local steps with example-level privacy: per-example gradients bounded, summed and noised."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.clients.base import DenseGradient, State, Step
from fedsim.mechanisms import NoiseSource, Releaser
from fedsim.mechanisms.base import without_noise
from fedsim.privacy.local_work import LocalWork
from fedsim.randomness import Purpose
from fedsim.training.batches import MAX_CHUNK, Batches
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.paths.examples import GradientMethod
from fedsim.training.side_effects import Seeds
from fedsim.training.steps import RoundClients, StepLoop, StepLoopResult, Stepper

GPU_CHUNK = 256
MECHANISM = "mechanism."
"""Prefix of the names of the mechanism's state in the state that a client keeps."""


def max_chunk(stepper: Stepper) -> int:
    """Most examples in a chunk; more on a GPU, to save launches, if rows then fit in 1 GiB."""
    small = stepper.packing.layout.d <= 2**30 // (4 * GPU_CHUNK)
    return GPU_CHUNK if stepper.device.type == "cuda" and small else MAX_CHUNK


class PrivateLoop(StepLoop):
    """Steps on gradients that are noisy sums of bounded per-example gradients.

    Every gradient is a release. Batches and noise are drawn on the host; all that is computed from
    examples stays on the device.

    Parameters
    ----------
    stepper : Stepper
    privacy : ExamplePrivacy
    method : GradientMethod
        Computes per-example gradients.
    work : LocalWork
    batches : Batches
        Batches with a chunk axis, ``[n, S, chunks, B]``.
    clients : RoundClients
        The clients, with their randomness for noise and their state from earlier rounds.
    seeds : Seeds or None
        Seeds of the model's own random draws, if it makes any.
    keeps_state : bool
        Whether the mechanism's state outlives a round.
    """

    def __init__(
        self,
        stepper: Stepper,
        privacy: ExamplePrivacy,
        method: GradientMethod,
        work: LocalWork,
        batches: Batches,
        clients: RoundClients,
        seeds: Seeds | None,
        *,
        keeps_state: bool,
    ) -> None:
        super().__init__(stepper, batches, clients.round, seeds)
        self.rows, self.keeps_state = method.rows, keeps_state
        self.counts = (batches.weight > 0).sum(axis=3)
        self.usable = self.weight > 0
        if (unusable := stepper.data.unusable) is not None:  # their gradients count as zero
            self.usable &= torch.from_numpy(~unusable[batches.index]).to(stepper.device)
        self.noise: list[NoiseSource] = []
        """Source of each client's noise, from which its steps draw in turn."""
        plans = []
        for client, source in zip(clients.client_ids.tolist(), clients.randomness, strict=True):
            generator = source.generator(
                Purpose.NOISE, level="example", round=clients.round, client=client
            )
            self.noise.append(NoiseSource(generator, privacy.hardened))
            plan = privacy.plan(work, stepper.data.size(client))
            if plan is not None:
                plans.append(plan)
        layout = stepper.packing.layout
        self.releaser = Releaser(plans, layout, device=stepper.device, exact=False)
        self.state: dict[str, Tensor] = {}
        """The mechanism's state, of the clients that were active in the last step."""
        for name, initial in privacy.mechanism.init(layout).items():
            start = initial.to(stepper.device).expand(len(clients), *initial.shape)
            if keeps_state:
                start = clients.carried.entry(MECHANISM + name, default=start)
            self.state[name] = start

    def step(self, state: State, index: int, active: int) -> None:
        """One step of the first ``active`` clients."""
        stepper = self.stepper
        # The guarantee rests on this: the release is all that the algorithm sees of the examples.
        mean = self._noisy_mean(stepper.algorithm.point(state), index, active)
        gradient = DenseGradient(stepper.packing.pack(mean))
        stepper.algorithm.step(state, gradient, Step(self.round, index))

    def _noisy_mean(self, point: Tensor, index: int, active: int) -> Tensor:
        """Noisy means ``[active, d]`` of a step's gradients, which are summed chunk by chunk."""
        data, dtype = self.stepper.data, self.stepper.dtype
        total = self.releaser.start({k: v[:active] for k, v in self.state.items()}, active)
        losses = torch.zeros_like(self.weight[:active, index])
        chunks = self.index.shape[2]
        seeds = None if self.seeds is None else self.seeds.of_step(index, active, chunks).T.tolist()
        for chunk in range(chunks):
            # Chunks bound the memory that a batch of any size needs; some are empty for all.
            counts = self.counts[:active, index, chunk]
            if not counts.any():
                continue
            examples = self.index[:active, index, chunk]
            usable = self.usable[:active, index, chunk].double()
            x, y = data.inputs(examples, dtype), data.targets(examples, dtype)
            for block in self.rows(point, x, y, counts.tolist(), seeds and seeds[chunk]):
                clients, b = block.clients, block.rows.count
                losses[clients, chunk, :b] = block.losses
                total.add_owners(block.rows, usable[clients, :b], block.counts, clients)
        self.losses.append(losses.flatten(1))
        release = self.releaser.release(total, *self.noise[:active])
        self.state = dict(release.state)
        return release.mean

    def results(self, state: State, first: int) -> StepLoopResult:
        """Results of the clients from position ``first`` on, with the mechanism's state."""
        end = super().results(state, first)
        if self.keeps_state:
            # It has rows for the clients of the last step only; the ones that end are its last.
            clients = slice(first, first + len(end.theta))
            for name, tensor in without_noise(self.state).items():
                end.carried[MECHANISM + name] = tensor[clients]
        return end

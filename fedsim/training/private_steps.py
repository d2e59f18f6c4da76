"""Local steps with example-level privacy: per-example gradients bounded, summed and noised.

On a GPU a step of a whole block is captured (`fedsim.training.graphs`), so that nothing in it may
depend on how many examples were drawn: a chunk goes through the model whole, and padding, which is
copies of one of the client's own examples, has weight 0 in the sum. Only the number of chunks
follows the largest batch of the step: a chunk of nothing but padding adds zeros, and changes no
bit. Noise from a known seed is drawn in the step (`fedsim.kernels.device_normals`); noise from the
operating system's entropy is drawn on the host and given to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedsim.clients.base import DenseGradient, LocalAlgorithm, State, Step
from fedsim.kernels.device_normals import normals_at, stream_words
from fedsim.mechanisms import NoiseSource, Releaser
from fedsim.mechanisms.partial import PartialSum
from fedsim.mechanisms.releaser import BlockNoise, normals
from fedsim.privacy import Entropy
from fedsim.privacy.local_work import LocalWork
from fedsim.randomness import Purpose
from fedsim.training.batches import MAX_CHUNK, Batches
from fedsim.training.client_state import CarriedState
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.paths.examples import GradientMethod
from fedsim.training.side_effects import Seeds
from fedsim.training.steps import (
    RoundClients,
    StepLoop,
    StepLoopResult,
    Stepper,
    counter_of_step,
)

GPU_CHUNK = 256
MECHANISM = "mechanism."
"""Prefix of the names of the mechanism's state in the state that a client keeps."""

# Prefixes and names of entries of a private step's state that are not the algorithm's: what the
# mechanism keeps, the releaser's numbers, and the noise, or what it is drawn from.
RELEASE = "release."
_STATE, _NUMBER = f"{RELEASE}state.", f"{RELEASE}number."
_DRAWS, _KEY, _COUNTER = f"{RELEASE}draws", f"{RELEASE}key", f"{RELEASE}counter"


def max_chunk(stepper: Stepper) -> int:
    """Most examples in a chunk; more on a GPU, to save launches, if rows then fit in 1 GiB."""
    small = stepper.packing.layout.d <= 2**30 // (4 * GPU_CHUNK)
    return GPU_CHUNK if stepper.device.type == "cuda" and small else MAX_CHUNK


def draws_on_device(device: torch.device, entropy: Entropy) -> bool:
    """Whether noise is drawn on the device: on a GPU, where it comes from a known seed.

    Noise that must stay secret comes from the host's generator on every device: one generator and
    one path to review, and no key of it in a GPU's memory. The device's draws are no secret anyway.
    """
    return device.type == "cuda" and entropy == "config"


@dataclass
class PrivateStepper:
    """Makes a private step of any of a trainer's clients, eagerly or captured.

    What differs between clients and rounds is in the state, under names that begin with `RELEASE`
    and that no algorithm sees.

    Attributes
    ----------
    stepper : Stepper
    method : GradientMethod
        Computes per-example gradients.
    releaser : Releaser
        Of any of the clients.
    hardened : bool
        Whether noise withstands attacks on floating-point sampling.
    draws_in_step : bool
        Whether noise is drawn where the step is made, and not on the host.
    """

    stepper: Stepper
    method: GradientMethod
    releaser: Releaser
    hardened: bool
    draws_in_step: bool

    @property
    def algorithm(self) -> LocalAlgorithm:
        """The local algorithm."""
        return self.stepper.algorithm

    def step_eagerly(
        self,
        state: State,
        index: Tensor,
        usable: Tensor,
        at: Step,
        counts: Sequence[Sequence[int]] | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Update the state of ``n`` clients, operation by operation.

        Parameters
        ----------
        state : State
        index : int64 Tensor ``[n, chunks, B]``
            Indices of each client's examples.
        usable : bool Tensor ``[n, chunks, B]``
            False for padding, and for examples that must not count.
        at : Step
        counts : sequence of ``chunks`` sequences of n ints, optional
            Numbers of the clients' real examples, which come first in a chunk; the padding after
            them may be left out. Without it all ``B`` go through the model.
        seeds : sequence of ``chunks`` sequences of n ints, optional
            Seeds of the model's own random draws.

        Returns
        -------
        Tensor ``[n, chunks * B]``
            Loss of each example, unweighted.
        """
        own = {name: state.pop(name) for name in [*state] if name.startswith(RELEASE)}
        releaser = self.releaser.with_numbers(_entries(own, _NUMBER))
        total = releaser.start(_entries(own, _STATE), len(index))
        losses = self._add_rows(total, state, index, usable, at, counts, seeds)
        release = releaser.release(total, BlockNoise(self._draws(own, at)))
        # The guarantee rests on this: the release is all that the algorithm sees of the examples.
        self.algorithm.step(state, DenseGradient(self.stepper.packing.pack(release.mean)), at)
        state |= own | {_STATE + name: tensor for name, tensor in release.state.items()}
        return losses

    def try_step(self, state: State, index: Tensor, at: Step) -> None:
        """A step of a made-up block, on a chunk ``[n, B]`` taken twice, and noise that is drawn."""
        n, release = len(index), self.releaser
        given = {_NUMBER + k: v.expand(n) for k, v in release.owner_numbers.items()}
        for name, initial in release.mechanism.init(release.layout).items():
            given[_STATE + name] = initial.to(index.device).expand(n, *initial.shape)
        draws = torch.zeros(n, sum(release.draw_sizes), dtype=torch.float64, device=index.device)
        index = index[:, None].expand(-1, 2, -1)
        usable = torch.ones_like(index, dtype=torch.bool)
        state |= given | {_DRAWS: draws}
        replace(self, draws_in_step=False).step_eagerly(state, index, usable, at)

    def _add_rows(
        self,
        total: PartialSum,
        state: State,
        index: Tensor,
        usable: Tensor,
        at: Step,
        counts: Sequence[Sequence[int]] | None,
        seeds: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Add the examples' gradients chunk by chunk, in bounded memory; returns their losses."""
        stepper, dtype, point = self.stepper, self.stepper.dtype, self.algorithm.point(state)
        n, chunks, B = index.shape
        losses = torch.zeros_like(usable, dtype=dtype)
        for chunk in range(chunks):
            x = stepper.inputs(state, index[:, chunk], at, chunk)
            y = stepper.data.targets(index[:, chunk], dtype)
            weights = usable[:, chunk].double()
            real = [B] * n if counts is None else counts[chunk]
            own_seeds = None if seeds is None else seeds[chunk]
            for block in self.method.rows(point, x, y, real, own_seeds):
                clients, b = block.clients, block.rows.count
                losses[clients, chunk, :b] = block.losses
                total.add_owners(block.rows, weights[clients, :b], block.counts, clients)
                del block  # or its rows would be there beside the next ones
        return losses.flatten(1)

    def _draws(self, own: State, at: Step) -> Tensor:
        """Standard normal draws ``[n, size]`` of this step, which has an address of its own."""
        if not self.draws_in_step:
            draws: Tensor = own.pop(_DRAWS)
            return draws
        counter = counter_of_step(own[_COUNTER], at)
        size = sum(self.releaser.draw_sizes)
        return normals_at(own[_KEY], counter, size, hardened=self.hardened)


def _entries(state: State, prefix: str) -> State:
    """Entries whose names begin so, without the prefix."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


class PrivateLoop(StepLoop):
    """Steps on gradients that are noisy sums of bounded per-example gradients.

    Every gradient is a release. Batches are drawn on the host; all that is computed from examples
    stays on the device.

    Parameters
    ----------
    private : PrivateStepper
    privacy : ExamplePrivacy
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
        private: PrivateStepper,
        privacy: ExamplePrivacy,
        work: LocalWork,
        batches: Batches,
        clients: RoundClients,
        seeds: Seeds | None,
        *,
        keeps_state: bool,
    ) -> None:
        stepper = private.stepper
        super().__init__(stepper, batches, clients.round, seeds)
        self.private, self.keeps_state = private, keeps_state
        self.counts = (batches.weight > 0).sum(axis=3)
        self.usable = self.weight > 0
        if (unusable := stepper.data.unusable) is not None:  # their gradients count as zero
            self.usable &= torch.from_numpy(~unusable[batches.index]).to(stepper.device)
        sizes = map(stepper.data.size, clients.client_ids.tolist())
        plans = [plan for size in sizes if (plan := privacy.plan(work, size)) is not None]
        layout = stepper.packing.layout
        releaser = Releaser(plans, layout, device=stepper.device, exact=False)
        self.release: State = {_NUMBER + k: v for k, v in releaser.owner_numbers.items()}
        """Entries of the state that are not the algorithm's, before the first step."""
        for name, initial in privacy.mechanism.init(layout).items():
            start = initial.to(stepper.device).expand(len(clients), *initial.shape)
            if keeps_state:
                start = clients.carried.entry(MECHANISM + name, default=start)
            self.release[_STATE + name] = start
        self.noise: list[NoiseSource] = []
        """Source of each client's noise, from which its steps draw in turn; none if they are drawn
        in the step."""
        self._prepare_noise(clients)

    def _prepare_noise(self, clients: RoundClients) -> None:
        streams: list[tuple[Sequence[int], Sequence[int]]] = []
        ids, steps = clients.client_ids.tolist(), self.batches.steps.tolist()
        for client, source, count in zip(ids, clients.randomness, steps, strict=True):
            address: Any = {"level": "example", "round": clients.round, "client": client}
            if self.private.draws_in_step:
                parts = range(count)  # each step has an address of its own
                streams.append(source.counters(Purpose.STEP_NOISE, **address, parts=parts))
            else:
                generator = source.generator(Purpose.NOISE, **address)
                self.noise.append(NoiseSource(generator, self.private.hardened))
        if streams:
            self.release[_KEY], self.release[_COUNTER] = stream_words(streams, self.stepper.device)

    def init_state(self, theta: Tensor, numbers: State, carried: CarriedState) -> State:
        """The initial state, with what the releases need."""
        return super().init_state(theta, numbers, carried) | self.release

    def step(self, state: State, index: int, active: int) -> None:
        """One step of the first ``active`` clients."""
        private, at = self.private, Step(self.round, index)
        drawn = self.counts[:active, index]
        # Real examples fill one chunk after another: the last ones may be empty for all clients.
        chunks = int(drawn.any(axis=0).sum())
        if not private.draws_in_step:
            state[_DRAWS] = normals(
                self.noise[:active], private.releaser.draw_sizes, self.stepper.device
            )
        whole = self.index.is_cuda and private.method.takes_blocks and self.seeds is None
        if whole:
            chunks = max(1, chunks)
        inputs = self.index[:active, index, :chunks], self.usable[:active, index, :chunks]
        if whole and self.stepper.captured_step is not None:
            losses = self.stepper.captured_step(state, *inputs, at)
        else:
            seeds = None
            if self.seeds is not None:
                seeds = self.seeds.of_step(index, active, self.index.shape[2]).T.tolist()
            counts = None if whole else drawn.T.tolist()
            losses = private.step_eagerly(state, *inputs, at, counts, seeds)
        self.losses.append(losses)

    def results(self, state: State, first: int) -> StepLoopResult:
        """Results of the clients from position ``first`` on, with the mechanism's state."""
        algorithms = {k: value for k, value in state.items() if not k.startswith(RELEASE)}
        end = super().results(algorithms, first)
        if self.keeps_state:
            for name, tensor in _entries(state, _STATE).items():
                end.carried[MECHANISM + name] = tensor.clone()
        return end

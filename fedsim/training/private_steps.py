"""Local steps on releases of single examples' gradients: bounded, summed, noised, divided."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.base import Dense, State, Step
from fedsim.mechanisms import NoiseSource, Releaser
from fedsim.mechanisms.base import without_noise
from fedsim.mechanisms.releaser import NUMBERS
from fedsim.privacy.noise import Noise
from fedsim.randomness import Purpose, Randomness
from fedsim.training.batches import WIDEST, Batches, Ints, Workload
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.paths.examples import GradientMethod
from fedsim.training.steps import RoundClients, Stepper, Steps

GPU_CHUNK = 256
MECHANISM = "mechanism."
"""What the names of the mechanism's state begin with, among what a client keeps."""


@dataclass(frozen=True)
class PrivateStepFactory:
    """Batches and steps of clients that protect their examples: every gradient is a release.

    Parameters
    ----------
    stepper : Stepper
    workload : Workload
    privacy : ExamplePrivacy
    method : GradientMethod
        Gives the gradients of single examples.
    draws : bool
        Whether the model draws in training.
    keeps_state : bool
        Whether the mechanism's state outlives a round.
    """

    stepper: Stepper
    workload: Workload
    privacy: ExamplePrivacy
    method: GradientMethod
    draws: bool
    keeps_state: bool

    @property
    def reports_loss(self) -> bool:
        """Whether clients report their training loss, which nothing protects."""
        return self.privacy.unprotected_metrics

    def prefetched(self, client_ids: Ints, size: int) -> int:
        """Nobody: a client's ledger line is on disk before anything of its round is drawn."""
        return 0

    def batches(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> Iterator[Batches]:
        """Draw these clients' batches as their plan says, those of one width together."""
        indices = [self.stepper.data.indices[i] for i in client_ids]
        drawn = (self.workload.work, indices, client_ids, randomness, round)
        return self.privacy.batches(*drawn, self._widest_chunk)

    @property
    def _widest_chunk(self) -> int:
        """A GPU waits for launches, which wide chunks save, as long as their rows fit in 1 GiB."""
        small = self.stepper.packing.layout.d <= 2**30 // (4 * GPU_CHUNK)
        return GPU_CHUNK if self.stepper.device.type == "cuda" and small else WIDEST

    def steps(self, batches: Batches, clients: RoundClients) -> PrivateSteps:
        """The steps of the clients whose batches these are, ready to be run."""
        return PrivateSteps(self, batches, clients)


class PrivateSteps(Steps):
    """Steps on gradients that are noisy sums of bounded per-example gradients.

    Batches and noise are drawn on the host; what follows from the examples stays on the device.

    Parameters
    ----------
    factory : PrivateStepFactory
    batches : Batches
        With a chunk axis.
    clients : RoundClients
        Whose noise is drawn, and what they have from earlier rounds.
    """

    def __init__(
        self, factory: PrivateStepFactory, batches: Batches, clients: RoundClients
    ) -> None:
        stepper, privacy = factory.stepper, factory.privacy
        super().__init__(stepper, batches, clients.round, clients.seeds if factory.draws else None)
        self.rows, self.keeps_state = factory.method.rows, factory.keeps_state
        self.counts = (batches.weight > 0).sum(axis=3)
        self.usable = self.weight > 0
        if (unusable := stepper.data.unusable) is not None:  # their gradients count as zero
            self.usable &= torch.from_numpy(~unusable[batches.index]).to(stepper.device)
        self.noise, plans = [], []
        for client, source in zip(clients.client_ids.tolist(), clients.randomness, strict=True):
            self.noise.append(StepNoise(privacy.made, source, clients.round, client))
            plan = privacy.plan(factory.workload.work, stepper.data.size(client))
            if plan is not None:
                plans.append(plan)
        layout = stepper.packing.layout
        self.releaser = Releaser(plans, layout, device=stepper.device, exact=False)
        self.state: dict[str, Tensor] = {}
        """The mechanism's, of the clients that were active last."""
        for name, initial in privacy.mechanism.init(layout).items():
            start = initial.to(stepper.device).expand(len(clients), *initial.shape)
            kept = self.keeps_state
            self.state[name] = (
                clients.carried.instead_of(start, MECHANISM + name) if kept else start
            )

    def step(self, state: State, index: int, active: int) -> None:
        """One step of the first ``active`` clients."""
        stepper = self.stepper
        # The algorithm sees the release and nothing else of the examples.
        mean = self._released(stepper.algorithm.point(state), index, active)
        gradient = Dense(stepper.packing.pack(mean))
        stepper.algorithm.step(state, gradient, Step(self.round, index))

    def _released(self, point: Tensor, index: int, active: int) -> Tensor:
        """The noisy means ``[active, d]`` of a step's gradients, chunk by chunk."""
        data, dtype = self.stepper.data, self.stepper.dtype
        total = self.releaser.start({k: v[:active] for k, v in self.state.items()}, active)
        losses = torch.zeros_like(self.weight[:active, index])
        chunks = self.index.shape[2]
        seeds = None if self.seeds is None else self.seeds.of_step(index, active, chunks).T.tolist()
        for chunk in range(chunks):
            # A batch of any size goes through in chunks; a chunk may be empty for all clients.
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
        sources = [noise.of_step(index) for noise in self.noise[:active]]
        release = self.releaser.release(total, *sources)
        self.state = dict(release.state)
        return release.mean

    def mechanism_state(self, first: int, theta: Tensor) -> dict[str, Tensor]:
        """State of the mechanism of the clients that end, from position ``first``."""
        if not self.keeps_state:
            return {}
        clients = slice(first, first + len(theta))
        public = without_noise(self.state)
        return {MECHANISM + name: tensor[clients] for name, tensor in public.items()}


class StepNoise:
    """Sources of the noise of a client's steps in one round.

    Steps draw one after another from one source; or, where they share draws, each from addresses
    of its own, of which those of earlier steps are asked for again. Where draws come from the
    operating system these are keyed by a secret that ends with the round.
    """

    def __init__(self, noise: Noise, randomness: Randomness, round: int, client: int) -> None:
        self._hardened, self._shared = noise.hardened, noise.correlated
        if self._shared and randomness.seed is None:
            randomness = Randomness(0, secrets.token_hex(32))
        self._address = {"round": round, "client": client}
        self._randomness = randomness
        self._one = None if self._shared else NoiseSource(self._generator(0, 0, 0), self._hardened)

    def of_step(self, index: int) -> NoiseSource:
        """The source of a step's noise, from 0 on; each is asked for once."""
        if self._one is not None:
            return self._one
        elsewhere = partial(self._generator, index)
        return NoiseSource(self._generator(index, 0, 0), self._hardened, index + 1, elsewhere)

    def _generator(self, index: int, age: int, number: int) -> np.random.Generator:
        randomness = self._randomness.repeated() if age else self._randomness
        return randomness.generator(
            Purpose.NOISE,
            level="example",
            round=self._address["round"],
            client=self._address["client"],
            part=(index - age) * NUMBERS + number,
        )

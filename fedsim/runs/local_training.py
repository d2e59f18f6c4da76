"""What a run's clients do with their examples: the trainer, and how it protects each example."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fedsim.config import RunConfig
from fedsim.config.plan import entropy, local_work, made_noise, stopping
from fedsim.errors import FedsimError
from fedsim.privacy import WorstClient, worst_client
from fedsim.randomness import Randomness
from fedsim.runs import factories
from fedsim.runs.data_split import RunData
from fedsim.training import ClientData, ExamplePrivacy, Trainer, example_events
from fedsim.training.frozen_stem import behind_frozen_stem
from fedsim.training.paths.choice import KernelName
from fedsim.training.payload import Compression


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """How a run's clients train, whichever clients these are.

    Attributes
    ----------
    config : RunConfig
    model : nn.Module
        Initialised.
    personal : list of str
        Names of the parameters that clients keep to themselves.
    device : torch.device
    privacy : ExamplePrivacy or None
        What clients do to their examples' gradients.
    """

    config: RunConfig
    model: nn.Module
    personal: list[str]
    device: torch.device
    privacy: ExamplePrivacy | None = None

    def trainer(
        self, data: ClientData, test: ClientData | None = None, *, state_dir: Path | None = None
    ) -> Trainer:
        """A trainer of any clients' data, whose draws are keyed by the seed alone."""
        client = self.config.client
        all_clients = data.population == self.config.partition.clients
        # What the frozen layers make of an example never changes: it is computed once.
        model, seen = behind_frozen_stem(self.model, data)
        if test is not None:
            rest, seen_test = behind_frozen_stem(self.model, test)
            # Both or neither: one model takes them.
            if self.model in (model, rest):
                model, seen, seen_test = self.model, data, test
            test = seen_test
        return Trainer(
            model,
            factories.algorithm(self.config),
            seen,
            batch_size=client.batch_size,
            epochs=None if client.steps else client.epochs,
            steps=client.steps or None,
            counts=factories.counts(self.config) if all_clients else None,
            loss=factories.loss(self.config),
            metrics=factories.metrics(self.config),
            path=client.path,
            kernel=self._kernel,
            block_size=client.block_size,
            # With system entropy the seed is no secret: nothing that a client draws follows it.
            randomness=Randomness(seed_of(self.config)),
            device=self.device,
            privacy=self.privacy,
            max_grad_norm=client.max_grad_norm,
            compression=Compression.parse(client.compression),
            state=client.state,
            state_dir=state_dir,
            test=test,
            personal=self.personal,
        )

    @property
    def _kernel(self) -> KernelName:
        """As the config says; on a node of others' machines, compiled only where that can be.

        Nobody can make them install a compiler, and their updates differ by rounding alone.
        """
        deployed = self.config.engine.name == "deployment"
        kernel = self.config.client.kernel
        return "auto" if deployed and kernel == "compiled" else kernel


def seed_of(config: RunConfig) -> int | None:
    """What a run's draws follow from; None where they come from the operating system."""
    return None if entropy(config) == "system" else config.seed


def state_dir(config: RunConfig) -> Path | None:
    """Where clients keep what outlives a process: a directory for each run's name."""
    directory = config.client.state_dir
    return Path(directory) / config.name if directory else None


def ledger_dir(config: RunConfig, out: Path | None) -> Path | None:
    """Where clients' own ledgers are; None: in memory."""
    # Of all runs that share it, whatever they are called: the clients are the same.
    if config.client.state_dir:
        return Path(config.client.state_dir)
    return out / "clients" if out else None


def example_privacy(
    config: RunConfig, data: RunData, out: Path | None = None
) -> ExamplePrivacy | None:
    """What clients do to their examples' gradients; None without example-level privacy.

    Parameters
    ----------
    config : RunConfig
    data : RunData
    out : path, optional
        The run's directory.

    Raises
    ------
    FedsimError
        If a client has fewer examples than a batch, and whole clients are not protected.
    """
    client = config.client
    if client.mechanism.name == "none":
        return None
    smallest = min(data.split.sizes, default=client.batch_size)
    # Where whole clients are protected too, how many examples one has decides nothing that others
    # see: a client with fewer than a batch takes them all.
    if client.batch_size > smallest and not config.private:
        raise FedsimError(
            f"client.batch-size = {client.batch_size}; with example-level privacy, where a "
            "batch is drawn at a rate of batch size over examples, it must be at most "
            f"{smallest}, what the smallest client has."
        )
    end = stopping(config.to_run_config())
    noise = made_noise(client.noise)
    unnoised = ExamplePrivacy(
        mechanism=factories.mechanism(client.mechanism),
        noise_multiplier=noise.multiplier,
        sampling=client.noise.sampling,
        chunk=client.noise.chunk,
        hardened=noise.hardened,
        delta=client.noise.delta,
        max_epsilon=client.noise.max_epsilon,
        stopping=end,
        ledger_dir=ledger_dir(config, out),
        unprotected_metrics=config.evaluate.unprotected,
    )
    target = client.noise.target_epsilon
    if target is None:
        return unnoised
    work = local_work(config)
    plans = (unnoised.plan(work, size, config.rounds) for size in data.planned_sizes)
    delta = end.planned_delta(client.noise.delta)
    needed = (plan.calibrated(target, delta) for plan in plans if plan is not None)
    noise_multiplier = max((plan.noise.multiplier for plan in needed), default=0.0)
    return replace(unnoised, noise_multiplier=noise_multiplier)


def most_expensive_client(
    config: RunConfig, privacy: ExamplePrivacy | None, sizes: Collection[int], rounds: int
) -> WorstClient | None:
    """Which of clients with so many examples pays most for so many rounds, if any does."""
    if privacy is None or not rounds:
        return None
    events = example_events(privacy, local_work(config), sizes, rounds)
    delta = privacy.stopping.planned_delta(privacy.delta)
    return worst_client(events, delta) if events else None

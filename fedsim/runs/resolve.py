"""Resolves a config: makes all objects of a run, in the order in which they need each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn

from fedsim.array_types import Floats, Ints
from fedsim.config import RunConfig
from fedsim.config.devices import Devices
from fedsim.config.plan import entropy, evaluation_event, resolve_bands
from fedsim.config.release_keys import release_digest, split_settings
from fedsim.datasets import Dataset
from fedsim.federation.arrays import tensors
from fedsim.federation.client_settings import ChargeExamples
from fedsim.mechanisms import Mechanism
from fedsim.privacy import Ledger, Level
from fedsim.privacy.digest import digest_of
from fedsim.privacy.noise import Correlated
from fedsim.privacy.plan import ReleasePlan
from fedsim.process import usable_cores
from fedsim.randomness import Randomness
from fedsim.runs import factories
from fedsim.runs.data_split import RunData, all_test_examples, client_data, device_of, resolve_data
from fedsim.runs.factories import example_privacy, make_trainer, seed_or_none, state_dir
from fedsim.runs.model import (
    initial_model,
    personal_parameters,
    public_inputs,
    shared_arrays,
    try_model,
)
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.runs.run_ledgers import ledger_paths
from fedsim.strategies import Availability, ClientMetrics, ClientTraining, DPFedAvg
from fedsim.training import ExamplePrivacy, Trainer


@dataclass(frozen=True, eq=False, kw_only=True)
class Resolved:
    """All objects of a run, and the config that describes them completely.

    Attributes
    ----------
    config : RunConfig
        Complete: values left to a rule or to a calibration are filled in. Resolving it again
        gives the same run.
    overrides : ObjectOverrides
        Python objects used instead of what the config names.
    out : path or None
        The run's directory.
    data : RunData
    model : nn.Module
        The initial model.
    notes : tuple of str
        Sentences about changes made to the model before training.
    initial_arrays : ArrayRecord
        The initial model's trained and shared parameters, in Flower's form.
    plan : ReleasePlan
        The server's release plan.
    trainer : Trainer
        Trainer of all clients, with their data.
    trainer_for : callable
        Makes such a trainer for other clients: `make_trainer` with the other arguments filled in.
    release : str
        Digest of all that determines what the run releases.
    devices : Devices
        Simulated devices of the clients.
    """

    config: RunConfig
    overrides: ObjectOverrides
    out: Path | None
    data: RunData
    model: nn.Module
    notes: tuple[str, ...]
    initial_arrays: ArrayRecord
    plan: ReleasePlan[Mechanism]
    trainer: Trainer
    trainer_for: Callable[..., Trainer]
    release: str
    devices: Devices

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Subjects of metrics.csv's columns that no noise protects; empty without privacy."""
        if not self.config.protects:
            return ()
        released = self.config.evaluate.private
        return ("train", *(() if released else ("clients",)), *self.data.client_splits)

    @property
    def read_client_splits(self) -> tuple[str, ...]:
        """Those of "test" and "validation" whose examples are clients'."""
        dealt = any(len(indices) for indices in self.data.client_test_indices or ())
        return tuple({*self.data.client_splits, *(["test"] if dealt else [])})


def resolve(
    config: RunConfig,
    overrides: ObjectOverrides | None = None,
    out: Path | None = None,
    *,
    data: RunData | None = None,
) -> Resolved:
    """Make all objects that a config describes.

    Parameters
    ----------
    config : RunConfig
    overrides : ObjectOverrides, optional
        Python objects to use instead of what the config names.
    out : path, optional
        The run's directory.
    data : RunData, optional
        Data to use instead of what `resolve_data` reads; a node has one client's only.

    Raises
    ------
    FedsimError
        If a setting is not allowed; the message names its key, its value and what is allowed.
    """
    config = resolve_bands(config)
    overrides = overrides or ObjectOverrides()
    data = data or resolve_data(config, overrides)
    if example := config.model.example:
        public = public_inputs(example, data.dataset).to(device_of(config))
        data = replace(data, dataset=replace(data.dataset, public=public))
    dataset, tests = data.dataset, data.client_test_indices
    clients = client_data(dataset, dataset.train, data.client_indices)
    test = None if tests is None else client_data(dataset, dataset.test, tests)

    model, notes = initial_model(config, dataset, overrides)
    try_model(config, model, dataset, clients)
    personal = personal_parameters(config, model)
    # Copied before the trainer is made: trainers use the model's parameters as scratch memory.
    arrays = shared_arrays(model, personal)

    plan = factories.release_plan(config)
    privacy = example_privacy(config, data)
    device = device_of(config)
    trainer_for = partial(
        make_trainer, config, model, device=device, personal=personal, privacy=privacy
    )
    trainer = trainer_for(clients, test, state_dir=state_dir(config))

    # In this order: the digest covers the trainer's path, and then keys the trainer's draws.
    released = _release_config(config, plan, privacy, trainer)
    release = run_digest(released, overrides, dataset, on_device=trainer.draws_noise_in_steps)
    trainer.key_by(release)

    complete = {"client.block-size": trainer.block_size, "engine.device": trainer.device.type}
    return Resolved(
        config=released.replace(**complete),
        overrides=overrides,
        out=out,
        data=data,
        model=model,
        notes=(*notes, *_implied(config)),
        initial_arrays=arrays,
        plan=plan,
        trainer=trainer,
        trainer_for=trainer_for,
        release=release,
        devices=Devices.from_settings(
            config.devices,
            config.partition.clients,
            config.seed,
            examples=trainer.workload.examples,
            steps=partial(_steps, config, trainer),
            cohort=plan.sampler,
            down=trainer.received_layout.d * trainer.layout.dtype.itemsize,
            up=trainer.row_layout.d * trainer.layout.dtype.itemsize,
        ),
    )


def _implied(config: RunConfig) -> list[str]:
    """A sentence for each key that takes its only legal value."""
    chosen = f"client.name = '{config.client.name}'"
    if config.model.personal:
        chosen += f" with model.personal = '{config.model.personal}'"
    return [
        f"{table}.{key} is '{getattr(getattr(config, table), key)}', as {chosen} needs."
        for table, key in config.implied
    ]


def _steps(config: RunConfig, trainer: Trainer, client_ids: Ints) -> Floats:
    """Local steps of each client, ``[n]``: declared ones, or those that its examples take."""
    if not config.client.steps:
        return trainer.workload.steps(client_ids)
    counts = trainer.workload.counts
    if counts is not None:
        return counts[client_ids].astype(np.float64)
    return np.full(len(client_ids), float(config.client.steps))


def calibrated(config: RunConfig, overrides: ObjectOverrides | None = None) -> RunConfig:
    """A config with noise multipliers instead of target epsilons.

    A node or a resumed run that reads it need not calibrate, and draws the same noise.
    """
    config = resolve_bands(config)
    privacy = None
    if config.client.noise.target_epsilon is not None:
        privacy = example_privacy(config, resolve_data(config, overrides))
    plan = None if config.noise.target_epsilon is None else factories.release_plan(config)
    return config.replace(**_multipliers(config, plan, privacy))


def _multipliers(
    config: RunConfig,
    plan: ReleasePlan[Mechanism] | None,
    privacy: ExamplePrivacy | None,
) -> dict[str, str | float]:
    resolved_keys: dict[str, str | float] = {}
    # A user's noise has options instead of keys (`object_settings`); its coefficients are computed
    # each time.
    if plan is not None and isinstance(plan.noise, Correlated) and config.noise.object_settings:
        resolved_keys["noise.coefficients"] = plan.noise.coefficients
    if plan is not None and config.noise.target_epsilon is not None:
        resolved_keys |= {
            "noise.multiplier": plan.event().noise_multiplier,
            "noise.target-epsilon": "",
        }
        if (evaluation := evaluation_event(config)) is not None:
            resolved_keys["evaluate.multiplier"] = evaluation.noise_multiplier
    if privacy is not None and config.client.noise.target_epsilon is not None:
        z = privacy.noise_multiplier
        resolved_keys |= {"client.noise.multiplier": z, "client.noise.target-epsilon": ""}
    return resolved_keys


def _release_config(
    config: RunConfig,
    plan: ReleasePlan[Mechanism],
    privacy: ExamplePrivacy | None,
    trainer: Trainer,
) -> RunConfig:
    """The config with all values filled in that determine what is released."""
    path, kernel = config.client.path, config.client.kernel
    resolved_keys = _multipliers(config, plan, privacy) | {
        "noise.entropy": entropy(config),
        "client.path": trainer.path.name if path == "auto" else path,
        "client.kernel": trainer.kernel if kernel == "auto" else kernel,
    }
    flat = config.to_run_config()
    complete = all(flat.get(key) == value for key, value in resolved_keys.items())
    return config if complete else config.replace(**resolved_keys)


def run_digest(
    released: RunConfig, overrides: ObjectOverrides, dataset: Dataset, *, on_device: bool
) -> str:
    """Digest of all that determines what a run releases.

    That is its config, its Python objects, and whether examples' noise is drawn on a GPU.
    """
    digest, objects = release_digest(released), overrides.digest(dataset)
    parts = {"config": digest} | ({"given": objects} if objects else {})
    parts |= {"noise drawn on": "device"} if on_device else {}
    return digest_of(parts) if len(parts) > 1 else digest


def driver_charges_examples(config: RunConfig) -> bool:
    """Whether the process that drives a run records what its clients' examples are charged.

    In a deployment each node keeps evidence of its own.
    """
    return config.client.mechanism.name != "none" and config.engine.name != "deployment"


def open_ledger(resolved: Resolved, level: Level, run: Path | None) -> Ledger:
    """The ledger of a run in a directory, or in memory: the server's, or that of the examples."""
    config = resolved.config
    noise = config.noise if level == "client" else config.client.noise
    mark = resolved.overrides.mark(resolved.data.dataset)
    return Ledger(
        ledger_paths(config.to_run_config(), run).get(level),
        delta=noise.delta,
        max_epsilon=config.noise.max_epsilon if level == "client" else None,
        declared_event=resolved.plan.event() if level == "client" else None,
        keeps="log" if entropy(config) == "config" else "evidence",
        split=split_settings(config, mark),
    )


def _charge(trainer: Trainer) -> ChargeExamples:
    return lambda client_ids, number, partly: trainer.charge(client_ids, number, partly=partly)


def make_strategy(resolved: Resolved, ledger: Ledger | None = None) -> DPFedAvg:
    """Make a run's strategy, which writes its releases to ``ledger``."""
    config = resolved.config
    client, evaluate, trainer = config.client, config.evaluate, resolved.trainer
    server_optimizer = copy.deepcopy(resolved.overrides.strategy)
    plan = resolved.plan
    weighs_by_size = plan.mechanism.weighting == "num-examples" and not plan.weights
    sizes = None
    if client.private and config.mechanism.name == "none" and weighs_by_size:
        # Private clients do not report their sizes; those of the split are public.
        sizes = [len(indices) for indices in resolved.data.client_indices]
    return DPFedAvg(
        plan=resolved.plan,
        delta=config.noise.delta,
        max_epsilon=config.noise.max_epsilon,
        ledger=ledger,
        seed=Randomness(seed_or_none(config), resolved.release),
        server_optimizer=server_optimizer or factories.server_optimizer(config),
        clients=ClientTraining(
            algorithm=factories.algorithm(config),
            private_examples=client.private,
            example_counts=sizes,
            # In a deployment each node charges itself.
            charge=_charge(trainer) if client.private and driver_charges_examples(config) else None,
        ),
        metrics=ClientMetrics(
            every=max(evaluate.clients_every, 1),
            quantiles=True,
            private=factories.private_metrics(config),
            unprotected=evaluate.unprotected,
        ),
        availability=Availability(
            replying=resolved.devices.replying,
            reachable=resolved.devices.reachable,
            schedule=resolved.devices.schedule,
            real_time=config.engine.name == "deployment" and config.cohort.name == "buffered",
            node_timeout=config.engine.node_timeout,
            max_failed_rounds=config.server.max_failed_rounds,
        ),
        fraction_evaluate=evaluate.fraction if evaluate.clients_every else 0.0,
    )


class CentralEvaluation:
    """Loss and metrics on test and validation examples, every ``evaluate.every`` rounds.

    Attributes
    ----------
    trainers : mapping of str to Trainer
        One each for ``test`` and ``validation`` examples. All examples of a split are given to one
        client, which has no state and is none of the run's own clients.
    """

    def __init__(self, resolved: Resolved) -> None:
        data, config = resolved.data, resolved.config
        dataset = data.dataset
        self._every, self._last = config.evaluate.every, config.rounds
        self._layout, self._device = resolved.trainer.layout, resolved.trainer.device
        splits = {"test": all_test_examples(dataset)} if self._every else {}
        if self._every and config.data.validation:
            splits["validation"] = client_data(dataset, dataset.train, [data.held_out])
        # They only evaluate: without privacy they skip the trial of per-example gradients.
        self.trainers = {
            name: resolved.trainer_for(split, privacy=None) for name, split in splits.items()
        }
        cores = usable_cores()
        for trainer in self.trainers.values():
            # The workers are idle during a central evaluation, so that it may use their cores.
            trainer.evaluation.threads = min(config.engine.workers or cores, cores)

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Metrics of a round's parameters; None in a round without evaluation."""
        if not self._every or (server_round % self._every and server_round != self._last):
            return None
        vector = self._layout.flatten(tensors(arrays)).to(self._device)
        metrics: dict[str, int | float | list[int] | list[float]] = {}
        for split, trainer in self.trainers.items():
            (measured,) = evaluated(trainer, vector, server_round)
            metrics |= {f"{split}-{name}": value for name, value in measured.items()}
        return MetricRecord(metrics)


def evaluated(trainer: Trainer, vector: Tensor, round: int) -> list[dict[str, float]]:
    """Loss and metrics of ``vector [d]`` on the examples of each of a trainer's clients."""
    of_client: dict[int, dict[str, float]] = {}
    for block in trainer.evaluate(vector, np.arange(trainer.population), round):
        metrics = {name: m for name, m in block.metrics.items() if name != "num-examples"}
        for row, client_id in enumerate(block.client_ids):
            of_client[int(client_id)] = {name: float(m[row]) for name, m in metrics.items()}
    return [of_client[client_id] for client_id in sorted(of_client)]

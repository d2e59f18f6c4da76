"""What each table of a config stands for: one function a table."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.serverapp.strategy import Strategy

from fedsim import mechanisms, partitions, tasks
from fedsim.clients import LocalAlgorithm, Proximal
from fedsim.clients.schedules import CONSTANT, Schedule
from fedsim.config import RunConfig, instantiate
from fedsim.config.plan import cohort, made_noise, stopping, with_added_noise
from fedsim.config.privacy_sections import ClientMechanismSection, MechanismSection
from fedsim.devices import Devices, draw_work, read_trace, read_work
from fedsim.errors import FedsimError
from fedsim.federation.optimizers import FlowerOptimizer, Scheduled
from fedsim.mechanisms import Mechanism
from fedsim.privacy.plan import ReleasePlan
from fedsim.strategies import RobustMean, ServerOptimizer
from fedsim.tasks import Loss, Metric


def partition(config: RunConfig) -> partitions.Partition:
    """The partitioner, seeded."""
    made = instantiate.make(config.partition, clients=config.partition.clients, seed=config.seed)
    if not isinstance(made, partitions.Partition):
        raise FedsimError(
            f"partition.name is '{config.partition.name}'; it must name a "
            "fedsim.partitions.Partition."
        )
    return made


def aggregated(settings: MechanismSection) -> Mechanism | RobustMean:
    """What becomes of a round's updates: a mechanism's sum, or their robust mean."""
    made = instantiate.make(settings)
    alone = not (settings.per_layer or settings.private_scalar)
    return made if alone and isinstance(made, RobustMean) else _composed(made, settings)


def mechanism(settings: MechanismSection | ClientMechanismSection) -> Mechanism:
    """The mechanism that bounds updates, or a client's per-example gradients."""
    return _composed(instantiate.make(settings), settings)


def _composed(bound: Any, settings: MechanismSection | ClientMechanismSection) -> Mechanism:
    """A bound in what the settings put around it."""
    if settings.per_layer:
        bound = mechanisms.PerLayer(bound)
    if isinstance(settings, MechanismSection) and settings.private_scalar:
        bound = mechanisms.PrivateScalar(
            bound,
            name=settings.private_scalar,
            high=settings.private_scalar_high,
            fraction=settings.private_scalar_fraction,
        )
    if not isinstance(bound, Mechanism):
        raise FedsimError(
            f"{settings.table}.name is '{settings.name}'; it must name a "
            "fedsim.mechanisms.Mechanism."
        )
    return bound


def algorithm(config: RunConfig) -> LocalAlgorithm:
    """The client algorithm.

    Raises
    ------
    FedsimError
        If one of the user's own cannot be found or made.
    """
    client = config.client
    made = instantiate.make(client)
    if not isinstance(made, LocalAlgorithm):
        raise FedsimError(f"client.name is '{client.name}'; it must name a LocalAlgorithm.")
    made = made.where_noised(client.private)
    return Proximal(made, client.proximal) if client.proximal else made


def counts(config: RunConfig) -> npt.NDArray[np.int64] | None:
    """Each client's own number of epochs or steps; None where all have one."""
    work, clients = config.client.work, config.partition.clients
    if not work:
        return None
    drawn = re.fullmatch(r"whole\((\d+), *(\d+)\)", work)
    if drawn is None:
        return read_work(Path(work), clients)
    return draw_work(config.seed, clients, int(drawn[1]), int(drawn[2]))


def devices(config: RunConfig) -> Devices:
    """The devices that clients are."""
    section = config.devices
    trace = read_trace(Path(section.trace), config.partition.clients) if section.trace else None
    return Devices(config.seed, **asdict(section) | {"trace": trace})


def release_plan(config: RunConfig) -> ReleasePlan[Mechanism | RobustMean]:
    """What the server releases: its noise as the config says, or calibrated to the target."""
    added = with_added_noise(config)
    noise = added.noise
    plan = ReleasePlan(
        level="client",
        sampler=cohort(config),
        bound=aggregated(config.mechanism),
        noise=made_noise(noise),
        rounds=config.rounds,
    )
    if noise.target_epsilon is None:
        return plan
    delta = stopping(config.to_run_config()).planned_delta(noise.delta)
    return plan.calibrated(noise.target_epsilon, delta)


def loss(config: RunConfig) -> Loss:
    """The loss of an example."""
    return tasks.loss_of(config.task.loss, *instantiate.loss(config.task))


def metrics(config: RunConfig) -> dict[str, Metric]:
    """What an evaluation reports besides the loss, by what it is called there."""
    return {
        label: tasks.metric_of(*described)
        for label, described in instantiate.metrics(config.task).items()
    }


def server_optimizer(config: RunConfig) -> ServerOptimizer:
    """What the server does with the noisy mean."""
    made = instantiate.make(config.server)
    optimizer: ServerOptimizer = FlowerOptimizer(made) if isinstance(made, Strategy) else made
    if not all(callable(getattr(optimizer, name, None)) for name in ("step", "state", "restore")):
        raise FedsimError(
            f"server.optimizer is '{config.server.optimizer}'; it must name a "
            "fedsim.strategies.ServerOptimizer, or a strategy of Flower's that refines the mean."
        )
    try:
        schedule = Schedule.parse(config.server.schedule)
    except FedsimError as error:
        raise FedsimError(f"server.schedule = '{config.server.schedule}': {error}") from None
    return optimizer if schedule == CONSTANT else Scheduled(optimizer, schedule)

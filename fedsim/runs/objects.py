"""What each table of a config stands for: one function a table."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
from flwr.serverapp.strategy import Strategy

from fedsim import mechanisms, partitions, tasks
from fedsim.clients import LocalAlgorithm, Proximal
from fedsim.clients.schedules import CONSTANT, Schedule
from fedsim.config import RunConfig, things
from fedsim.config.client_sections import ClientMechanismSection
from fedsim.config.sections import MechanismSection
from fedsim.devices import Devices, draw_work, read_trace, read_work
from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism
from fedsim.strategies import ServerOptimizer
from fedsim.strategies.flower_optimizer import FlowerOptimizer
from fedsim.strategies.scheduled import Scheduled
from fedsim.tasks import Loss, Metric

__all__ = [
    "algorithm",
    "counts",
    "devices",
    "loss",
    "mechanism",
    "metrics",
    "partition",
    "server_optimizer",
]


def partition(config: RunConfig) -> partitions.Partition:
    """The partitioner, seeded."""
    made = things.make(config.partition, clients=config.partition.clients, seed=config.seed)
    if not isinstance(made, partitions.Partition):
        raise FedsimError(
            f"partition.name is '{config.partition.name}'; it must name a "
            "fedsim.partitions.Partition."
        )
    return made


def mechanism(settings: MechanismSection | ClientMechanismSection) -> Mechanism:
    """The mechanism that bounds updates, or a client's per-example gradients."""
    bound: Mechanism = things.make(settings)
    if not isinstance(bound, Mechanism):
        raise FedsimError(
            f"{settings.table}.name is '{settings.name}'; it must name a "
            "fedsim.mechanisms.Mechanism."
        )
    if settings.per_layer:
        bound = mechanisms.PerLayer(bound)
    if isinstance(settings, MechanismSection) and settings.private_scalar:
        bound = mechanisms.PrivateScalar(
            bound,
            name=settings.private_scalar,
            high=settings.private_scalar_high,
            fraction=settings.private_scalar_fraction,
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
    made = things.make(client)
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
    return Devices(config.seed, trace=trace, **section.model_dump(exclude={"trace"}))


def loss(config: RunConfig) -> Loss:
    """The loss of an example."""
    return tasks.loss_of(config.task.loss, *things.loss(config.task))


def metrics(config: RunConfig) -> dict[str, Metric]:
    """What an evaluation reports besides the loss, by what it is called there."""
    return {
        label: tasks.metric_of(*described)
        for label, described in things.metrics(config.task).items()
    }


def server_optimizer(config: RunConfig) -> ServerOptimizer:
    """What the server does with the noisy mean."""
    made = things.make(config.server)
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

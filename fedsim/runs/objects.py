"""What each table of a config stands for: one function a table."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from fedsim import mechanisms, partitions, tasks
from fedsim.clients import LocalAlgorithm
from fedsim.clients.catalog import make_algorithm, parse_options
from fedsim.config import RunConfig
from fedsim.config.sections import ClientMechanismSection, MechanismSection
from fedsim.mechanisms import Mechanism
from fedsim.strategies import ServerOptimizer, adam, sgd
from fedsim.tasks import Loss, Metric

__all__ = ["algorithm", "loss", "mechanism", "metrics", "partition", "server_optimizer"]


def partition(config: RunConfig) -> partitions.Partition:
    """The partitioner, seeded."""
    settings, seed = config.partition, config.seed
    match settings.name:
        case "iid":
            return partitions.IID(clients=settings.clients, seed=seed)
        case "dirichlet":
            return partitions.Dirichlet(alpha=settings.alpha, clients=settings.clients, seed=seed)
        case "shards":
            return partitions.Shards(shards=settings.shards, clients=settings.clients, seed=seed)
        case "interpolated-pathological":
            groups = (
                partitions.parse_groups(settings.groups)
                if settings.groups
                else partitions.CIFAR10_PAIRS
            )
            return partitions.InterpolatedPathological(
                randomness=settings.randomness, groups=groups, clients=settings.clients, seed=seed
            )


_MECHANISMS: dict[str, type[Any]] = {
    "none": mechanisms.NoPrivacy,
    "clipping": mechanisms.Clipping,
    "normalization": mechanisms.Normalization,
    "quantile-clipping": mechanisms.QuantileClipping,
    "adaclip": mechanisms.AdaClip,
    "adaptive-noise": mechanisms.AdaptiveNoise,
    "norm-bound": mechanisms.NormBound,
    "coordinate-clipping": mechanisms.CoordinateClipping,
}


def mechanism(settings: MechanismSection | ClientMechanismSection) -> Mechanism:
    """The mechanism that bounds updates, or a client's per-example gradients."""
    mechanism_type = _MECHANISMS[settings.name]
    values = {field.name: getattr(settings, field.name) for field in fields(mechanism_type)}
    if settings.name == "adaptive-noise" and settings.threshold is None:
        values["threshold"] = math.inf
    built: Mechanism = mechanism_type(**values)
    if settings.per_layer:
        built = mechanisms.PerLayer(built)
    if isinstance(settings, MechanismSection) and settings.private_scalar:
        built = mechanisms.PrivateScalar(
            built,
            name=settings.private_scalar,
            high=settings.private_scalar_high,
            fraction=settings.private_scalar_fraction,
        )
    return built


def algorithm(config: RunConfig) -> LocalAlgorithm:
    """The client algorithm.

    Raises
    ------
    FedsimError
        If one of the user's own cannot be found or made.
    """
    settings = config.client
    return make_algorithm(
        settings.name,
        parse_options(settings.options),
        offered={name: getattr(settings, name) for name in type(settings).model_fields},
        private=settings.private,
        mu=settings.proximal,
    )


def loss(config: RunConfig) -> Loss:
    """The loss of an example."""
    return tasks.loss_named(config.model.loss)


def metrics(config: RunConfig) -> dict[str, Metric]:
    """What an evaluation reports besides the loss: one metric for each name, by its last part."""
    found: dict[str, Metric] = {}
    for name in filter(None, (part.strip() for part in config.model.metrics.split(","))):
        found[name.rpartition(":")[2]] = tasks.metric_named(name)
    return found


def server_optimizer(config: RunConfig) -> ServerOptimizer:
    """What the server does with the noisy mean."""
    server = config.server
    if server.optimizer == "adam":
        return adam(lr=server.lr, betas=(server.beta1, server.beta2), eps=server.eps)
    return sgd(lr=server.lr, momentum=server.momentum)

"""From a config to the objects that it describes."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn

from fedsim import datasets, mechanisms, models, partitions
from fedsim.clients import SGD, ClientData, LocalAlgorithm, Trainer
from fedsim.cohorts import Cohort, FixedCohort, FullCohort, PoissonCohort
from fedsim.config import RunConfig
from fedsim.config_sections import ClientMechanismSection, MechanismSection
from fedsim.engines.arrays import array_record, tensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism
from fedsim.privacy import calibrate
from fedsim.randomness import Randomness
from fedsim.strategies import DPFedAvg, ServerOptimizer, adam, sgd

__all__ = ["Build", "algorithm", "cohort", "mechanism", "partition"]


class Build:
    """Everything that a run is made of, each part built when it is first asked for.

    Parameters
    ----------
    config : RunConfig
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = _device(config.engine.device)

    @cached_property
    def dataset(self) -> datasets.Dataset:
        """The examples, on the run's device."""
        data = self.config.data
        return datasets.load(
            data.name, directory=data.dir, download=data.download, normalize=data.normalize
        ).to(self.device)

    @cached_property
    def parts(self) -> list[partitions.Indices]:
        """Each client's training examples."""
        settings = self.config.partition
        parts = partition(self.config).indices(self.dataset.y_train.cpu().numpy())
        if settings.max_examples:
            parts = partitions.subsample(parts, settings.max_examples, seed=self.config.seed)
        return parts

    @cached_property
    def model(self) -> nn.Module:
        """The initial model, on the CPU."""
        settings = self.config.model
        model = models.build(
            settings.name,
            self.dataset.input_shape,
            self.dataset.num_classes,
            widths=settings.widths,
            bias=settings.bias,
            dtype=getattr(torch, settings.dtype),
            seed=self.config.seed,
        )
        models.freeze(model, settings.trainable)
        if self.config.private:
            models.refuse_running_statistics(model)
        return model

    @cached_property
    def trainer(self) -> Trainer:
        """The client algorithm with every client's data."""
        dataset = self.dataset
        return self.make_trainer(self._data(dataset.x_train, dataset.y_train, self.parts))

    @cached_property
    def examiner(self) -> Trainer:
        """The same over the test examples, all of them one client's."""
        everything = [np.arange(len(self.dataset.y_test), dtype=np.int64)]
        dataset = self.dataset
        return self.make_trainer(self._data(dataset.x_test, dataset.y_test, everything))

    def _data(self, x: Tensor, y: Tensor, parts: list[partitions.Indices]) -> ClientData:
        statistics = (self.dataset.mean, self.dataset.std)
        return ClientData(x, y, parts, *(_channels(each) for each in statistics))

    def make_trainer(self, data: ClientData) -> Trainer:
        """A trainer of this run's model and algorithm over any clients' data."""
        client = self.config.client
        return Trainer(
            self.model,
            algorithm(self.config),
            data,
            batch_size=client.batch_size,
            epochs=None if client.steps else client.epochs,
            steps=client.steps or None,
            path=client.path,
            block_size=client.block_size,
            randomness=Randomness(self.config.seed),
            device=self.device,
        )

    @cached_property
    def resolved(self) -> RunConfig:
        """The config with everything filled in that a rule chose: device, path, block size."""
        chosen: dict[str, str | int] = {
            "client.path": self.trainer.path.name,
            "client.block-size": self.trainer.block_size,
            "engine.device": self.device.type,
            "noise.entropy": self.entropy,
        }
        return self.config.replace(**chosen)

    @property
    def entropy(self) -> Literal["config", "system"]:
        """Where cohorts and noise come from; in deployment, from the system by default."""
        deployed = self.config.engine.name == "deployment"
        return self.config.noise.entropy or ("system" if deployed else "config")

    @cached_property
    def noise_multiplier(self) -> float:
        """The noise multiplier: as given, or calibrated to the target."""
        noise = self.config.noise
        if noise.target_epsilon is None:
            return noise.multiplier or 0.0
        return calibrate(
            target_epsilon=noise.target_epsilon,
            cohort=cohort(self.config),
            rounds=self.config.rounds,
            delta=noise.delta,
        )

    @cached_property
    def initial_arrays(self) -> ArrayRecord:
        """The trained parameters as Flower sends them, and nothing else."""
        return array_record(
            {
                name: parameter.detach().clone()
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad
            }
        )

    def strategy(self, ledger: Path | None = None) -> DPFedAvg:
        """A fresh strategy that writes its releases to ``ledger``."""
        config = self.config
        evaluate = config.evaluate
        return DPFedAvg(
            mechanism=mechanism(config.mechanism),
            cohort=cohort(config),
            noise_multiplier=self.noise_multiplier,
            delta=config.noise.delta,
            max_epsilon=config.noise.max_epsilon,
            ledger=ledger,
            seed=None if self.entropy == "system" else config.seed,
            server_optimizer=_server_optimizer(config),
            placement=config.noise.placement,
            hardened_noise=config.noise.hardened,
            fraction_evaluate=evaluate.fraction if evaluate.clients_every else 0.0,
            evaluate_every=max(evaluate.clients_every, 1),
            node_timeout=config.engine.node_timeout,
            max_failed_rounds=config.server.max_failed_rounds,
            unprotected_metrics=evaluate.unprotected,
        )

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Loss and accuracy on the test examples, in the rounds in which they are asked for."""
        every, last = self.config.evaluate.every, self.config.rounds
        if not every or (server_round % every and server_round != last):
            return None
        vector = self.examiner.layout.flatten(tensors(arrays)).to(self.device)
        block = next(iter(self.examiner.evaluate(vector, np.zeros(1, np.int64), server_round)))
        return MetricRecord(
            {
                f"test-{name}": float(values[0])
                for name, values in block.metrics.items()
                if name != "num-examples"
            }
        )


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


def cohort(config: RunConfig) -> Cohort:
    """The cohort sampler over the declared population."""
    settings, population = config.cohort, config.partition.clients
    match settings.name:
        case "poisson":
            return PoissonCohort(rate=settings.rate, population=population)
        case "fixed":
            return FixedCohort(size=settings.size, population=population)
        case "full":
            return FullCohort(population=population)


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
    kind = _MECHANISMS[settings.name]
    values = {field.name: getattr(settings, field.name) for field in fields(kind)}
    if settings.name == "adaptive-noise" and settings.threshold is None:
        values["threshold"] = math.inf
    built: Mechanism = kind(**values)
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
    """The client algorithm."""
    client = config.client
    return SGD(lr=client.lr, momentum=client.momentum, weight_decay=client.weight_decay)


def _server_optimizer(config: RunConfig) -> ServerOptimizer:
    server = config.server
    if server.optimizer == "adam":
        return adam(lr=server.lr, betas=(server.beta1, server.beta2), eps=server.eps)
    return sgd(lr=server.lr, momentum=server.momentum)


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise FedsimError("engine.device = 'cuda', but there is no CUDA device; it must be 'cpu'.")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def _channels(statistics: tuple[float, ...] | None) -> Tensor | None:
    """One number a channel, so that it broadcasts over ``[C, H, W]``."""
    if statistics is None:
        return None
    return torch.tensor(statistics, dtype=torch.float64).view(-1, 1, 1)

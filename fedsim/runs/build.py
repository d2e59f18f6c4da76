"""From a config to the objects that it describes."""

from __future__ import annotations

import copy
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn

from fedsim import datasets, models, partitions
from fedsim.config import RunConfig
from fedsim.config.digest import release_digest
from fedsim.config.plan import cohort, entropy, local_work, realised, stopping
from fedsim.datasets.checks import UNUSABLE
from fedsim.devices import Devices
from fedsim.engines.arrays import array_record, tensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism
from fedsim.privacy import ClientLedgers, WorstClient, worst_client
from fedsim.privacy.digest import digest_of
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.privacy.stopping import Stopping
from fedsim.randomness import Randomness
from fedsim.runs import objects
from fedsim.runs.dealing import Dealt, deal, load_dataset, refuse_found
from fedsim.runs.example_level import example_privacy
from fedsim.runs.given import Given
from fedsim.runs.initial_model import copied_model, named_model, prepared_model
from fedsim.strategies import DPFedAvg
from fedsim.strategies.client_budgets import ClientBudget
from fedsim.training import ClientData, ExamplePrivacy, Trainer, example_events
from fedsim.training.compression import Compression
from fedsim.training.paths.frozen import past_frozen
from fedsim.training.personal import Personal

__all__ = ["Build"]


class Build:
    """Everything that a run is made of, each part built when it is first asked for.

    Parameters
    ----------
    config : RunConfig
    out : path, optional
        The run's directory: clients' own ledgers go there, unless ``client.state-dir`` is set.
    given : Given, optional
        Objects that take the place of what the config names.
    """

    def __init__(
        self, config: RunConfig, out: Path | None = None, given: Given | None = None
    ) -> None:
        self.config = config
        self.out = out
        self.given = given or Given()
        self.device = _device(config.engine.device)
        self._notes: list[str] = []

    @cached_property
    def dataset(self) -> datasets.Dataset:
        """The examples, on the run's device."""
        data, given = self.config.data, self.given.data
        dataset = self._loaded() if given is None else given
        private = self.config.private or self.config.client.private
        if private:
            dataset = dataset.protected()
        elif given is not None:
            given.check_sizes()
        if given is not None and (data.train or data.test):
            dataset = dataset.ranged(data.train, data.test)
        if private:
            refuse_found(dataset, self.partition)
        return dataset.to(self.device)

    def _loaded(self) -> datasets.Dataset:
        return load_dataset(self.config)

    @cached_property
    def dealt(self) -> Dealt:
        """Whose examples are whose, and which are nobody's."""
        return deal(self.config, self.partition, self.dataset)

    @cached_property
    def partition(self) -> partitions.Partition:
        """Who deals them."""
        given, declared = self.given.partition, self.config.partition.clients
        if given is not None and given.clients != declared:
            raise FedsimError(
                f"partition has {given.clients} clients, and partition.clients = {declared}, the "
                "declared population; they must be the same."
            )
        return given or objects.partition(self.config)

    @property
    def parts(self) -> list[partitions.Indices]:
        """Each client's training examples."""
        return self.dealt.train

    @cached_property
    def model(self) -> nn.Module:
        """The initial model, on the CPU."""
        given = self.given.model
        model = named_model(self.config, self.dataset) if given is None else copied_model(given)
        model, self._notes = prepared_model(self.config, model)
        return model

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what was done to the model."""
        _ = self.model  # made by now
        return tuple(self._notes)

    @cached_property
    def trainer(self) -> Trainer:
        """The client algorithm with every client's data."""
        trainer = self._unkeyed
        trainer.randomness = self.randomness
        return trainer

    @cached_property
    def _unkeyed(self) -> Trainer:
        """`trainer`, before there is a release digest, into which its path enters."""
        dataset, dealt = self.dataset, self.dealt
        test = None if dealt.test is None else self.client_data(dataset.test, dealt.test)
        clients = self.client_data(dataset.train, dealt.train)
        return self.make_trainer(clients, test, state_dir=self.state_dir)

    @cached_property
    def examiners(self) -> dict[str, Trainer]:
        """The same over the test examples, all of them one client's, and over those held out.

        That client has kept nothing: it is none of those whose state lies in ``state_dir``.
        """
        everything = np.arange(len(self.dataset.test), dtype=np.int64)
        examiners = {"test": self.make_trainer(self.client_data(self.dataset.test, [everything]))}
        if self.config.data.validation:
            held_out = self.client_data(self.dataset.train, [self.dealt.held_out])
            examiners["validation"] = self.make_trainer(held_out)
        return examiners

    def client_data(self, split: datasets.Split, parts: list[partitions.Indices]) -> ClientData:
        """Examples of this run's data set, and whose they are."""
        unusable = split.columns.get(UNUSABLE)
        return ClientData(split.x, split.y, parts, *self.statistics, split.mask, unusable)

    @property
    def statistics(self) -> tuple[Tensor | None, Tensor | None]:
        """Mean and standard deviation by which inputs are normalised; None where they are not."""
        images = self.dataset.train.x.dim() == 4
        mean, std = (_channels(k, images) for k in (self.dataset.mean, self.dataset.std))
        return mean, std

    def make_trainer(
        self, data: ClientData, test: ClientData | None = None, *, state_dir: Path | None = None
    ) -> Trainer:
        """A trainer of this run's model and algorithm over any clients' data."""
        client = self.config.client
        all_clients = data.population == self.config.partition.clients
        # What the frozen layers make of an example never changes: it is computed once.
        model, seen = past_frozen(self.model, data)
        if test is not None:
            rest, seen_test = past_frozen(self.model, test)
            # Both or neither: one model takes them.
            if self.model in (model, rest):
                model, seen, seen_test = self.model, data, test
            test = seen_test
        return Trainer(
            model,
            objects.algorithm(self.config),
            seen,
            batch_size=client.batch_size,
            epochs=None if client.steps else client.epochs,
            steps=client.steps or None,
            counts=objects.counts(self.config) if all_clients else None,
            loss=objects.loss(self.config),
            metrics=objects.metrics(self.config),
            path=client.path,
            block_size=client.block_size,
            # With system entropy the seed is no secret: nothing that a client draws follows it.
            randomness=Randomness(self.seed),
            device=self.device,
            privacy=self.example_privacy,
            max_grad_norm=client.max_grad_norm,
            compression=Compression.parse(client.compression),
            state=client.state,
            state_dir=state_dir,
            test=test,
            personal=self.personal,
        )

    @cached_property
    def personal(self) -> list[str]:
        """Names of the parameters that clients keep to themselves."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        kept = models.matching("model.personal", self.config.model.personal, names)
        # With a normalisation's parameters go its statistics, whatever the patterns.
        personal = {*models.statistics_of(self.model), *kept}
        return [name for name in names if name in personal]

    @property
    def state_dir(self) -> Path | None:
        """Where clients keep what outlives a process: a directory for each run's name."""
        kept = self.config.client.state_dir
        return Path(kept) / self.config.name if kept else None

    @cached_property
    def example_privacy(self) -> ExamplePrivacy | None:
        """What clients do to their examples' gradients; None without example-level privacy."""
        client = self.config.client
        if client.mechanism.name == "none":
            return None
        # A node with data of its own has none of these, and needs none without a target.
        calibrated = set() if client.noise.target_epsilon is None else self._calibrated_sizes
        return example_privacy(self.config, self._sizes, calibrated, self.ledger_dir)

    @property
    def _sizes(self) -> set[int]:
        """Numbers of examples that clients have."""
        return {len(indices) for indices in self.parts if len(indices)}

    @property
    def _example_counts(self) -> list[int] | None:
        """What updates are weighed by where clients do not tell: the partition's sizes, public."""
        weighs = objects.mechanism(self.config.mechanism).weighting == "num-examples"
        if not self.config.client.private or self.config.mechanism.name != "none" or not weighs:
            return None
        return [len(indices) for indices in self.parts]

    @property
    def _calibrated_sizes(self) -> set[int]:
        """Those of them that a noise multiplier must be enough for."""
        return self._sizes

    def worst_client(self, rounds: int) -> WorstClient | None:
        """Who pays most for so many rounds at example level, if anybody does."""
        privacy = self.example_privacy
        if privacy is None or not rounds:
            return None
        events = example_events(privacy, local_work(self.config), self._sizes, rounds)
        delta = privacy.stopping.planned_delta(privacy.delta)
        return worst_client(events, delta) if events else None

    @cached_property
    def client_ledgers(self) -> ClientLedgers | None:
        """What clients have spent of their examples' privacy; None where nobody here can know.

        On engines of ours they are the trainer's; other processes on this machine write theirs
        to files; nodes elsewhere keep theirs.
        """
        client, engine = self.config.client, self.config.engine
        if client.mechanism.name == "none" or engine.federation:
            return None
        if engine.name in ("local", "ray"):
            return self.trainer.ledgers
        return ClientLedgers(self.ledger_dir, delta=client.noise.delta, read_only=True)

    @property
    def ledger_dir(self) -> Path | None:
        """Where clients' own ledgers are, of all runs that share it; None: in memory."""
        # Of all runs that share it, whatever they are called: the clients are the same.
        kept = self.config.client.state_dir
        if kept:
            return Path(kept)
        return self.out / "clients" if self.out else None

    @cached_property
    def resolved(self) -> RunConfig:
        """The config with everything filled in that was left to a rule or to a calibration."""
        chosen: dict[str, str | int] = {
            "client.block-size": self.trainer.block_size,
            "engine.device": self.device.type,
        }
        return self.released.replace(**chosen)

    @cached_property
    def released(self) -> RunConfig:
        """The config with everything filled in that bears on what is released.

        Noise multipliers stand in the place of target epsilons: who reads this, a node or a
        resumed run, calibrates nothing, and draws the same noise.
        """
        config = self.config
        path = config.client.path
        chosen: dict[str, str | float] = {
            "noise.entropy": entropy(self.config),
            "client.path": self._unkeyed.path.name if path == "auto" else path,
        }
        if config.noise.target_epsilon is not None:
            chosen |= {"noise.multiplier": self.noise_multiplier, "noise.target-epsilon": ""}
        if self.example_privacy is not None and config.client.noise.target_epsilon is not None:
            z = self.example_privacy.noise_multiplier
            chosen |= {"client.noise.multiplier": z, "client.noise.target-epsilon": ""}
        resolved = config.to_run_config()
        nothing_left = all(resolved.get(key) == value for key, value in chosen.items())
        return config if nothing_left else config.replace(**chosen)

    @cached_property
    def release(self) -> str:
        """Digest of all that determines what the run releases."""
        digest, given = release_digest(self.released), self.given.digest()
        return digest_of({"config": digest, "given": given}) if given else digest

    @property
    def seed(self) -> int | None:
        """What draws follow from; None where they come from the operating system."""
        return None if entropy(self.config) == "system" else self.config.seed

    @property
    def randomness(self) -> Randomness:
        """Where cohorts, batches and noise come from."""
        return Randomness(self.seed, self.release)

    @cached_property
    def plan(self) -> ReleasePlan[Mechanism]:
        """What the server releases: its noise as given, or calibrated to the target."""
        noise = realised(self.config).noise
        plan = ReleasePlan(
            level="client",
            sampler=cohort(self.config),
            bound=objects.mechanism(self.config.mechanism),
            noise=Independent(noise.multiplier or 0.0, noise.hardened),
            rounds=self.config.rounds,
        )
        if noise.target_epsilon is None:
            return plan
        return plan.calibrated(noise.target_epsilon, self.stopping.planned_delta(noise.delta))

    @property
    def stopping(self) -> Stopping:
        """Whether what is released may end the run before its last round."""
        return stopping(self.config.to_run_config())

    @property
    def noise_multiplier(self) -> float:
        """The server's."""
        return self.plan.noise.multiplier

    @cached_property
    def initial_arrays(self) -> ArrayRecord:
        """The trained parameters that are shared, as Flower sends them, and nothing else."""
        parameters = dict(self.model.named_parameters())
        shared = Personal.of(self.model, self.personal).shared.layout
        return array_record(
            {entry.name: parameters[entry.name].detach().clone() for entry in shared.entries}
        )

    def strategy(self, ledger: Path | None = None) -> DPFedAvg:
        """A fresh strategy that writes its releases to ``ledger``."""
        config = self.config
        evaluate = config.evaluate
        return DPFedAvg(
            plan=self.plan,
            delta=config.noise.delta,
            max_epsilon=config.noise.max_epsilon,
            stopping=self.stopping,
            ledger=ledger,
            seed=self.randomness.seed,
            release=self.release,
            server_optimizer=copy.deepcopy(self.given.strategy) or objects.server_optimizer(config),
            placement=config.noise.placement,
            fraction_evaluate=evaluate.fraction if evaluate.clients_every else 0.0,
            evaluate_every=max(evaluate.clients_every, 1),
            evaluate_quantiles=True,
            node_timeout=config.engine.node_timeout,
            replying=self.replying,
            reachable=self.devices.reachable,
            max_failed_rounds=config.server.max_failed_rounds,
            algorithm=objects.algorithm(config),
            average_client_state=config.client.state == "server",
            unprotected_metrics=evaluate.unprotected,
            client_budget=self._client_budget(),
            budgets_end_run=not config.engine.federation,
            private_examples=config.client.private,
            example_counts=self._example_counts,
        )

    @cached_property
    def devices(self) -> Devices:
        """The devices that clients are."""
        return objects.devices(self.config)

    def replying(self, round: int, client_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of the clients that were drawn take part in a round; see `Devices`."""
        trainer = self.trainer
        values, size = trainer.row_layout.d, trainer.layout.dtype.itemsize
        down = up = values * size
        if trainer.compression is not None:
            up = trainer.compression.bytes(values, size)
        return self.devices.replying(round, client_ids, trainer.workload.examples, down, up)

    def _client_budget(self) -> ClientBudget | None:
        """What stops a run on an engine of ours before a client's budget is exceeded."""
        ours = self.config.engine.name in ("local", "ray")
        if not ours or self.config.client.noise.max_epsilon is None:
            return None
        return self.trainer.over_budget

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Loss and metrics on test and validation examples, in the rounds that ask for them."""
        every, last = self.config.evaluate.every, self.config.rounds
        if not every or (server_round % every and server_round != last):
            return None
        vector = self.trainer.layout.flatten(tensors(arrays)).to(self.device)
        metrics: dict[str, int | float | list[int] | list[float]] = {}
        for split, examiner in self.examiners.items():
            (block,) = examiner.evaluate(vector, np.zeros(1, np.int64), server_round)
            measured = {k: v for k, v in block.metrics.items() if k != "num-examples"}
            metrics |= {f"{split}-{name}": float(values[0]) for name, values in measured.items()}
        return MetricRecord(metrics)


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise FedsimError("engine.device = 'cuda', but there is no CUDA device; it must be 'cpu'.")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def _channels(statistics: tuple[float, ...] | None, images: bool) -> Tensor | None:
    """One number a channel, so that it broadcasts over ``[C, H, W]``, or one a feature."""
    if statistics is None:
        return None
    numbers = torch.tensor(statistics, dtype=torch.float64)
    return numbers.view(-1, 1, 1) if images else numbers

"""What one node of Flower's runtimes trains: a client with its own data."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import numpy as np
import torch
from flwr.app import Context

from fedsim import datasets
from fedsim.apps.identity import client_id
from fedsim.config import RunConfig
from fedsim.deploy.policy import NODE, Policy
from fedsim.engines.process import settle
from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism
from fedsim.partitions import Indices, Partition
from fedsim.runs.build import Build
from fedsim.runs.dealing import Dealt, refuse_found
from fedsim.runs.objects import mechanism, partition
from fedsim.training import Trainer

__all__ = ["NodeBuild", "mechanism_for", "trainer_for"]

Scalar = bool | int | float | str


class NodeBuild(Build):
    """`Build`, with the data of one client and of nobody else.

    Parameters
    ----------
    config : RunConfig
    client : int
        Its id.
    data : str
        Path to an ``.npz`` all of whose training examples are this client's; empty for the
        client's part of the run's data set.
    """

    def __init__(self, config: RunConfig, client: int, data: str = "") -> None:
        super().__init__(config)
        self._node_client = client
        self._file = data

    @functools.cached_property
    def _everybody(self) -> Build:
        return Build(self.config)

    @functools.cached_property
    def dataset(self) -> datasets.Dataset:
        """The client's examples, for training and for testing."""
        if self._file:
            settings = self.config.data
            # What a config declares of files holds for every client's: all but how they are saved.
            declared = settings.values() if settings.registered(settings.name) == "files" else {}
            declared.pop("columns", None)
            protected = self.config.private or self.config.client.private
            dataset = datasets.load(
                self._file, normalize=settings.normalize, protected=protected, **declared
            )
            if protected:
                dataset = dataset.protected()
                refuse_found(dataset, self._partition)
            train, test = dataset.train, dataset.test
            tests = self._partition.test_indices(train.columns, test.columns)
            # All of a file's training examples have one owner, who is the first client there.
            test = test[:0] if tests is None else test[torch.from_numpy(tests[0])]
        else:
            dataset, dealt = self._everybody.dataset, self._everybody.dealt
            train = dataset.train[torch.from_numpy(dealt.train[self._node_client])]
            test = dataset.test[:0]
            if dealt.test is not None:
                test = dataset.test[torch.from_numpy(dealt.test[self._node_client])]
        return replace(dataset, train=train, test=test).to(self.device)

    @property
    def _partition(self) -> Partition:
        return partition(self.config)

    @property
    def _calibrated_sizes(self) -> set[int]:
        """Everybody's, so that all nodes have the noise that the server has."""
        if self._file:
            raise FedsimError(
                "client.noise.target-epsilon is set, and a node with data of its own does not know "
                "how many examples others have; set client.noise.multiplier instead."
            )
        return self._everybody._calibrated_sizes

    @functools.cached_property
    def dealt(self) -> Dealt:
        """The client's examples are all that there are; everybody else has none here."""
        train, test = self.dataset.train, self.dataset.test
        owned = self._partition.test_indices(train.columns, test.columns) is not None
        return Dealt(
            self._all_its_own(len(train)),
            np.zeros(0, dtype=np.int64),
            self._all_its_own(len(test)) if owned else None,
        )

    def _all_its_own(self, count: int) -> list[Indices]:
        no_examples = np.zeros(0, dtype=np.int64)
        indices: list[Indices] = [no_examples] * self.config.partition.clients
        indices[self._node_client] = np.arange(count, dtype=np.int64)
        return indices


def trainer_for(context: Context) -> Trainer:
    """Trainer of a node: from the run's config, its own node config and its policy.

    The node config's ``partition-id`` says which client the node is. With ``data``, there or in
    the policy, the client has a file of examples, and otherwise they are its part of the run's
    data set, as in a simulation. What a node's client keeps goes where its policy says.

    Raises
    ------
    FedsimError
        If the node is no client of this run.
    """
    settle()
    config = RunConfig.from_run_config(context.run_config)
    data = str(context.node_config.get("data", ""))
    policy = Policy.here(config)
    if policy is not None and NODE in os.environ:
        keeps = config.client.private or config.client.state == "client"
        state_dir = str(policy.state.absolute()) if keeps else ""
        config = policy.budgeted(config.replace(**{"client.state-dir": state_dir}))
        data = policy.data_file
    return _trainer(config, client_id(context.node_config), data)


def mechanism_for(context: Context) -> Mechanism:
    """The mechanism with which a node bounds its own update, where it is asked to."""
    return mechanism(RunConfig.from_run_config(context.run_config).mechanism)


def _trainer(config: RunConfig, client: int, data: str) -> Trainer:
    if config.client.private and not config.client.state_dir:
        raise FedsimError(
            "client.state-dir is not set; a client with example-level privacy keeps its ledger "
            "there, which must outlive the process that trains."
        )
    if not 0 <= client < config.partition.clients:
        raise FedsimError(
            f"node-config 'partition-id' is {client}; it must lie in 0 .. "
            f"{config.partition.clients - 1}, the clients of the run."
        )
    if config.engine.name == "simulation" and not data:
        return _everybody(tuple(sorted(config.to_run_config().items())))
    return NodeBuild(config, client, data).trainer


@functools.lru_cache(maxsize=1)
def _everybody(flat: tuple[tuple[str, Scalar], ...]) -> Trainer:
    """One trainer for all the virtual clients that this process serves."""
    return Build(RunConfig.from_run_config(dict(flat))).trainer

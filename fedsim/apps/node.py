"""Set up one node of Flower's runtimes: a client with its own data."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context

from fedsim import datasets
from fedsim.array_types import Ints
from fedsim.config import RunConfig
from fedsim.datasets import Split
from fedsim.datasets.array_checks import input_names
from fedsim.datasets.tables import is_table
from fedsim.deploy.certificates import write_private
from fedsim.deploy.policy import NODE, Policy
from fedsim.errors import FedsimError
from fedsim.federation.engines.process import use_one_thread
from fedsim.federation.flower_internals import client_id
from fedsim.mechanisms import Mechanism
from fedsim.privacy import Ledger
from fedsim.runs.data_split import (
    RunData,
    device_of,
    partitioner,
    refuse_properties_of_protected_data,
    resolve_data,
)
from fedsim.runs.factories import mechanism
from fedsim.runs.resolve import Resolved, resolve
from fedsim.training import Trainer

Scalar = bool | int | float | str


def resolve_node(config: RunConfig, client: int, file: str = "") -> Resolved:
    """`resolve` a config with the data of one client only.

    Parameters
    ----------
    config : RunConfig
    client : int
        The client's id.
    file : str
        Path to the client's own data, whose training examples are all its own; empty for the
        client's part of the run's data set.

    Raises
    ------
    FedsimError
        If there is no usable data, or calibrating noise would need the data of all clients.
    """
    if not file:
        everybody = resolve_data(config)
        whole = everybody.dataset
        train = whole.train[torch.from_numpy(everybody.client_indices[client])]
        test = whole.test[:0]
        if everybody.client_test_indices is not None:
            test = whole.test[torch.from_numpy(everybody.client_test_indices[client])]
        sizes = everybody.planned_sizes
        data = _single_client_data(config, client, replace(whole, train=train, test=test), sizes)
        return resolve(config, data=data)
    settings = config.data
    # Settings of data.name = "files" apply to each client's file, except the columns and types of
    # a table if this client's file holds arrays.
    declared = settings.object_settings if settings.registered(settings.name) == "files" else {}
    if not is_table(Path(file)):
        of_tables = ("columns", "types", "tokenizer")
        declared = {k: v for k, v in declared.items() if k not in of_tables}
    protected = config.protects
    dataset = datasets.load(file, normalize=settings.normalize, protected=protected, **declared)
    dealer = partitioner(config)
    if protected:
        refuse_properties_of_protected_data(dataset, dealer)
    if config.client.noise.target_epsilon is not None:
        raise FedsimError(
            "client.noise.target-epsilon is set, and a node with data of its own does not know "
            "how many examples others have; set client.noise.multiplier instead."
        )
    train, test = dataset.train, dataset.test
    tests = dealer.test_indices(train.columns, test.columns)
    # All training examples of a file have one owner, so this client is number 0 of the file.
    test = test[:0] if tests is None else test[torch.from_numpy(tests[0])]
    data = _single_client_data(config, client, replace(dataset, train=train, test=test), ())
    return resolve(config, data=data)


def _single_client_data(
    config: RunConfig, client: int, dataset: datasets.Dataset, sizes: Collection[int]
) -> RunData:
    """Data of a run in which one client has all examples, and the others have none."""

    def own_indices(count: int) -> list[Ints]:
        no_examples = np.zeros(0, dtype=np.int64)
        indices: list[Ints] = [no_examples] * config.partition.clients
        indices[client] = np.arange(count, dtype=np.int64)
        return indices

    train, test = dataset.train, dataset.test
    owned = partitioner(config).test_indices(train.columns, test.columns) is not None
    no_indices = np.zeros(0, dtype=np.int64)
    tests = own_indices(len(test)) if owned else None
    dataset = dataset.to(device_of(config))
    return RunData(dataset, own_indices(len(train)), no_indices, tests, all_sizes=sizes)


def trainer_for(context: Context) -> Trainer:
    """Trainer of a node, from the run's config, the node's config and its policy.

    The node config's ``partition-id`` says which client the node is. If the node config or the
    policy has ``data``, it is a file with the client's examples; otherwise the client gets its
    part of the run's data set, as in a simulation. A client's state is kept where the policy says.

    Raises
    ------
    FedsimError
        If the node is not a client of this run.
    """
    use_one_thread()
    config = RunConfig.from_run_config(context.run_config)
    data = str(context.node_config.get("data", ""))
    policy = Policy.here(config)
    if policy is not None and NODE in os.environ:
        keeps = config.client.private or config.client.state == "client"
        state_dir = str(policy.state.absolute()) if keeps else ""
        config = policy.with_node_budget(config.replace(**{"client.state-dir": state_dir}))
        data = policy.data_file
    return _trainer(config, client_id(context.node_config), data)


def mechanism_for(context: Context) -> Mechanism:
    """The mechanism with which a node bounds its own update, when the server requests that."""
    own_mechanism: Mechanism = mechanism(RunConfig.from_run_config(context.run_config).mechanism)
    return own_mechanism


def _trainer(config: RunConfig, client: int, data: str) -> Trainer:
    simulated = config.engine.name == "simulation" and not data
    if config.client.private and not config.client.state_dir and not simulated:
        raise FedsimError(
            "client.state-dir is not set; a client with example-level privacy keeps its ledger "
            "there, which must outlive the process that trains."
        )
    if not 0 <= client < config.partition.clients:
        raise FedsimError(
            f"node-config 'partition-id' is {client}; it must lie in 0 .. "
            f"{config.partition.clients - 1}, the clients of the run."
        )
    if simulated:
        return _shared_trainer(tuple(sorted(config.to_run_config().items())))
    trainer = resolve_node(config, client, data).trainer
    if config.client.private:
        # Evidence, whatever the server says of its entropy: each request answered is a line.
        trainer.record_in(
            Ledger(
                Path(config.client.state_dir) / f"client-{client}.jsonl",
                delta=config.client.noise.delta,
                keeps="evidence",
                client=client,
            )
        )
    return trainer


@functools.lru_cache(maxsize=1)
def _shared_trainer(flat: tuple[tuple[str, Scalar], ...]) -> Trainer:
    """One trainer for all the virtual clients that this process serves."""
    # The process that drives the run records what its clients release.
    return resolve(RunConfig.from_run_config(dict(flat))).trainer.without_ledger()


def data_to_write(config: RunConfig) -> RunData:
    """The data set of a config and its split, for `write_client_data`."""
    return resolve_data(config.replace(**{"engine.device": "cpu"}))


def write_client_data(
    config: RunConfig, data: RunData, path_of: Callable[[int], Path]
) -> list[Path]:
    """Write each client's part of a config's data set to a file of its own.

    Parameters
    ----------
    config : RunConfig
    data : RunData
        Result of `data_to_write` for this config.
    path_of : callable
        Maps a client's id to the path of its ``.npz``.

    Returns
    -------
    list of Path
        One file per client, readable by the file's owner only.
    """
    dataset, owned = data.dataset, data.client_test_indices
    images = getattr(config.data, "layout", "auto") == "auto"
    # A client may lack examples of some classes or tokens, so the file declares their numbers.
    sizes: dict[str, Any] = {"classes": dataset.num_classes, "vocabulary": dataset.vocabulary}
    if isinstance(dataset.vocabulary, Mapping):
        sizes |= {f"vocabulary_{name}": size for name, size in sizes.pop("vocabulary").items()}
    about: dict[str, Any] = {name: np.array(size) for name, size in sizes.items() if size}
    for name, values in (("mean", dataset.mean), ("std", dataset.std)):
        if values is not None:
            about[name] = np.array(values)
    paths = []
    for client, rows in enumerate(data.client_indices):
        content = io.BytesIO()
        arrays = _arrays(dataset.train[torch.from_numpy(rows)], "train", images)
        # The client's own test examples; if it has none, one example for the shape and dtype.
        tests = np.zeros(0, np.int64) if owned is None else owned[client]
        shown = torch.from_numpy(tests) if len(tests) else slice(0, 1)
        arrays |= _arrays(dataset.test[shown], "test", images) | about
        np.savez_compressed(content, **arrays)
        paths.append(path_of(client))
        write_private(paths[-1], content.getvalue())
    return paths


def _arrays(split: Split, part: str, images: bool) -> dict[str, Any]:
    """Arrays of a split, by their names in a file."""
    arrays = split.arrays()
    for name in input_names(arrays):
        x = arrays[name]
        if x.ndim == 4 and (images or x.dtype == np.uint8):
            arrays[name] = x.transpose(0, 2, 3, 1)  # channels last, as images are written
    # An array of Python strings would be written as a pickle, which no reader takes.
    return {
        f"{name}_{part}": array.astype(np.str_) if array.dtype.hasobject else array
        for name, array in arrays.items()
    }

"""Loads a run's examples, holds some out, and splits the others among clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim import datasets, partitions
from fedsim.array_types import Ints
from fedsim.config import RunConfig
from fedsim.datasets import Dataset, Split
from fedsim.datasets.array_checks import UNUSABLE, input_names, not_finite
from fedsim.datasets.tables import FOUND
from fedsim.errors import FedsimError
from fedsim.named_tensors import NamedTensors, by_name
from fedsim.partitions import Partition
from fedsim.partitions.by_owner import has_owner, owner_order
from fedsim.privacy.plan import is_user_code
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.training import ClientData


@dataclass(frozen=True, eq=False)
class RunData:
    """The examples of a run, or of one of its clients, and their assignment to clients.

    Attributes
    ----------
    dataset : Dataset
        The data set, on the run's device.
    client_indices : list of int64 arrays
        Indices of each client's training examples.
    held_out : int64 array
        Indices of training examples held out for validation; may be empty.
    client_test_indices : list of int64 arrays, or None
        Indices of each client's test examples; None if test examples have no owners.
    client_splits : tuple of str
        In a private run, which of ``test`` and ``validation`` are clients' own examples: its
        guarantee does not cover metrics on them.
    all_sizes : collection of int, optional
        All clients' numbers of examples, if ``client_indices`` has one client's data only.
    """

    dataset: Dataset
    client_indices: list[Ints]
    held_out: Ints
    client_test_indices: list[Ints] | None = None
    client_splits: tuple[str, ...] = ()
    all_sizes: Collection[int] | None = None

    @property
    def sizes(self) -> set[int]:
        """The different numbers of training examples that clients have here, without 0."""
        return {len(indices) for indices in self.client_indices if len(indices)}

    @property
    def planned_sizes(self) -> Collection[int]:
        """Sizes of all clients, for which noise is calibrated to a target epsilon."""
        return self.sizes if self.all_sizes is None else self.all_sizes


def resolve_data(
    config: RunConfig,
    overrides: ObjectOverrides | None = None,
    *,
    load: Callable[[RunConfig], Dataset] | None = None,
) -> RunData:
    """Load a run's examples and split them among its clients.

    Parameters
    ----------
    config : RunConfig
    overrides : ObjectOverrides, optional
    load : callable, optional
        Function to use instead of `load_dataset`.

    Raises
    ------
    FedsimError
        If there are no examples, or they cannot be split this way; if a private run would derive
        something from protected examples, or show it; if the config's run had Python objects
        that are not given.
    """
    overrides = overrides or ObjectOverrides()
    overrides.refuse_missing(config)
    data, device = config.data, device_of(config)
    private = config.protects
    if overrides.data is None:
        dataset = (load or load_dataset)(config)
    else:
        dataset = overrides.data.ranged(data.train, data.test).checked(protected=private)
        if data.normalize and dataset.mean is None:
            raise FedsimError(
                "data.normalize is true, but data= has no mean and std; leave it false, or give "
                "them there (mean and std, or normalize=True of fedsim.datasets.from_table)."
            )
    partition = partition_of(config, overrides)
    if private:
        refuse_properties_of_protected_data(dataset, partition)
    return _split(config, partition, dataset.to(device))


def partition_of(config: RunConfig, overrides: ObjectOverrides) -> Partition:
    """The partition of a run: the one that it is given, else the config's.

    Raises
    ------
    FedsimError
        If it has another number of clients than the config declares.
    """
    override, declared = overrides.partition, config.partition.clients
    if override is not None and override.clients != declared:
        raise FedsimError(
            f"partition has {override.clients} clients, and partition.clients = {declared}, the "
            "declared population; they must be the same."
        )
    return override or partitioner(config)


def partitioner(config: RunConfig) -> Partition:
    """Make the config's partitioner, with its seed."""
    partition: Partition = config.partition.make(clients=config.partition.clients, seed=config.seed)
    return partition


def device_of(config: RunConfig) -> torch.device:
    """Device on which a run trains.

    Raises
    ------
    FedsimError
        If there is no such device.
    """
    name, available = config.engine.device, torch.cuda.is_available()
    if name == "cuda" and not available:
        raise FedsimError("engine.device = 'cuda', but there is no CUDA device; it must be 'cpu'.")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def client_data(dataset: Dataset, split: Split, client_indices: list[Ints]) -> ClientData:
    """Examples of a data set's split with their clients' indices and the data's normalisation."""
    unusable = split.columns.get(UNUSABLE)
    return ClientData(
        split.x,
        split.y,
        client_indices,
        *input_statistics(dataset),
        split.mask,
        unusable,
        dataset.public,
    )


def all_test_examples(dataset: Dataset) -> ClientData:
    """All of a data set's test examples that can be used, assigned to one client."""
    test = dataset.test
    unusable = test.columns.get(UNUSABLE, np.zeros(len(test), dtype=np.bool_))
    return client_data(dataset, test, [np.flatnonzero(~unusable)])


def test_examples_by(dataset: Dataset, column: str) -> dict[str, Ints]:
    """Positions of the usable test examples of each value of a column, in the values' order."""
    test = dataset.test
    usable = ~test.columns.get(UNUSABLE, np.zeros(len(test), dtype=np.bool_))
    values = test.columns[column].astype(str)
    return {
        value: np.flatnonzero(usable & (values == value))
        for value in sorted(set(values[usable].tolist()), key=owner_order)
    }


def input_statistics(dataset: Dataset) -> tuple[Tensor | None, Tensor | None]:
    """Mean and standard deviation of inputs, ``[C, 1, 1]`` or ``[features]``; None without."""
    # Of images, one number for each channel, which broadcasts over [C, H, W].
    shape = (-1, 1, 1) if dataset.train.x.dim() == 4 else (-1,)
    mean, std = (
        None if numbers is None else torch.tensor(numbers, dtype=torch.float64).view(shape)
        for numbers in (dataset.mean, dataset.std)
    )
    return mean, std


def empty_dataset(name: str, about: Mapping[str, Any]) -> Dataset:
    """A data set of these shapes without examples, which is enough to build a model."""
    shape, dtype = about["x-shape"], about["x-dtype"]
    if isinstance(shape, Mapping):
        x: Tensor = NamedTensors({k: _no_examples(shape[k], dtype[k]) for k in shape})
    else:
        x = _no_examples(shape, dtype)
    y = _no_examples(about["y-shape"], about["y-dtype"])
    mean, std = (None if about[key] is None else tuple(about[key]) for key in ("mean", "std"))
    split = Split(x, y)
    features, classes = (tuple(about.get(f"{one}_names", ())) for one in ("feature", "class"))
    declared = Dataset(name, split, split, about["classes"], about["vocabulary"], mean, std)
    return replace(declared, feature_names=features, class_names=classes)


def _no_examples(shape: Sequence[int], dtype: str) -> Tensor:
    return torch.zeros((0, *shape), dtype=getattr(torch, dtype))


def load_dataset(config: RunConfig, *, protected: bool | None = None) -> Dataset:
    """Load the data set that a config names; ``protected`` is whether the run protects it."""
    data = config.data
    return datasets.load(
        data.name,
        directory=data.dir,
        download=data.download,
        normalize=data.normalize,
        train=data.train,
        test=data.test,
        protected=config.protects if protected is None else protected,
        **data.settings_by_key,
    )


def _split(config: RunConfig, partition: Partition, dataset: Dataset) -> RunData:
    """Hold out validation examples, and split the others among clients."""
    train, test = dataset.train, dataset.test
    if config.evaluate.every and not len(test):
        raise FedsimError(
            f"evaluate.every = {config.evaluate.every}; it must be 0, since {dataset.name} has no "
            "test examples."
        )
    private = config.protects
    owners = train.columns.get(getattr(partition, "column", "owner"))
    client_splits = _client_splits(config, partition, dataset) if private else ()
    training, held_out = np.arange(len(train)), np.zeros(0, dtype=np.int64)
    if config.data.validation:
        training, held_out = partitions.hold_out(
            config.data.validation, len(train), owners, seed=config.seed
        )
    if private:
        # An example without an owner is no client's; one that cannot be used would not measure
        # anything. Neither is refused: that would depend on protected data.
        if owners is not None and isinstance(partition, partitions.ByOwner):
            owned = has_owner(owners)
            training, held_out = training[owned[training]], held_out[owned[held_out]]
        held_out = held_out[_usable_rows(train, held_out)]
    targets = train.y.cpu().numpy()[training]
    columns = {name: column[training] for name, column in train.columns.items()}
    client_indices = [training[indices] for indices in partition.indices(targets, columns)]
    if len(client_indices) != config.partition.clients:
        raise FedsimError(
            f"{partition} deals examples to {len(client_indices)} clients, and partition.clients = "
            f"{config.partition.clients}, the declared population; they must be the same."
        )
    if private and isinstance(partition, partitions.ByOwner):
        partition.require_every_client_an_owner(columns)
    if config.partition.max_examples:
        client_indices = partitions.subsample(
            client_indices, config.partition.max_examples, seed=config.seed
        )
    tests = partition.test_indices(columns, test.columns)
    return RunData(dataset, client_indices, held_out, tests, client_splits)


def _usable_rows(train: Split, rows: Ints) -> npt.NDArray[np.bool_]:
    """Which of these training examples have a usable label, and numbers that are all finite."""
    split = train[torch.from_numpy(rows)]
    arrays = split.arrays()
    unusable = arrays.get(UNUSABLE, np.zeros(len(rows), dtype=np.bool_))
    for name in (*input_names(arrays), "y"):
        unusable = unusable | not_finite(arrays[name], arrays.get("mask") if name == "y" else None)
    return ~unusable


def _client_splits(config: RunConfig, partition: Partition, dataset: Dataset) -> tuple[str, ...]:
    """Which of "test" and "validation" have examples that belong to a private run's clients.

    Raises
    ------
    FedsimError
        If metrics on them, which have no noise, would be shown without `evaluate.unprotected`.
    """
    columns = _owner_columns(partition, dataset)
    if not columns:
        return ()
    splits: list[str] = []
    if column := _clients_own_test_examples(dataset, columns):
        splits.append("test")
        if config.evaluate.every and not config.evaluate.unprotected:
            raise FedsimError(
                f"evaluate.every = {config.evaluate.every} measures test examples of clients "
                f"(column {column}), and metrics of clients' data have no noise: in a private run "
                "it must be 0, or evaluate.unprotected = true."
            )
    if config.data.validation:
        splits.append("validation")
        if not config.evaluate.unprotected:
            raise FedsimError(
                f"data.validation = {config.data.validation:g} holds out examples that have owners,"
                " and metrics of clients' data have no noise: in a private run it must be 0, or "
                "evaluate.unprotected = true."
            )
    return tuple(splits)


def refuse_properties_of_protected_data(dataset: Dataset, partition: Partition) -> None:
    """Refuse properties of a data set that were found in examples which a private run protects.

    Raises
    ------
    FedsimError
    """
    column = _clients_own_test_examples(dataset, _owner_columns(partition, dataset))
    for key, split in dataset.found_in.items():
        if split == "test" and not column:
            continue
        if key in ("mean", "types"):
            raise FedsimError(FOUND[key].format(name=dataset.name))
        noun = "classes" if key == "classes" else "tokens"
        reason = {
            "train": f"{dataset.name} has no test examples that tell how many {noun} there are",
            "test": f"the test examples of {dataset.name}, which tell how many {noun} there are, "
            f"belong to clients (column {column})",
        }[split]
        raise FedsimError(
            f"data.{key} is not set, and {reason}: in a private run their number is not taken from "
            f"clients' data; it must be declared, as data.{key} or by the file itself."
        )


def _owner_columns(partition: Partition, dataset: Dataset) -> list[str]:
    """Columns that may name an example's owner: all, for a user's partition that names none."""
    of_train = [name for name in dataset.train.columns if name != UNUSABLE]
    if is_user_code(partition) and not hasattr(partition, "column"):
        return of_train
    return [name for name in of_train if name == getattr(partition, "column", "owner")]


def _clients_own_test_examples(dataset: Dataset, columns: Sequence[str]) -> str:
    """First of these columns in which test and training examples share an owner; else ""."""
    for name in columns:
        train, test = (split.columns.get(name) for split in (dataset.train, dataset.test))
        if train is None or test is None:
            continue
        owners = (set(column[has_owner(column)].tolist()) for column in (train, test))
        if set.intersection(*owners):
            return name
    return ""


def data_shape(data: RunData) -> dict[str, Any]:
    """Shapes and types of a run's training examples, and each client's number of them, as JSON.

    A resumed run must have the same. Contents are not compared: no digest of them may be written.
    """
    x, y = data.dataset.train.x, data.dataset.train.y
    return {
        "x": by_name(lambda one: [str(one.dtype), list(one.shape[1:])], x),
        "y": [str(y.dtype), list(y.shape[1:])],
        "sizes": [len(indices) for indices in data.client_indices],
    }

"""A run's examples, and whose they are: loaded, held out, dealt to clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim import datasets, partitions
from fedsim.config import RunConfig
from fedsim.config.things import find, settings_for
from fedsim.datasets import Dataset
from fedsim.datasets.checks import UNUSABLE
from fedsim.errors import FedsimError
from fedsim.partitions import Indices

__all__ = ["Dealt", "deal", "load_dataset", "refuse_found"]


@dataclass(frozen=True, eq=False)
class Dealt:
    """Positions of examples.

    Attributes
    ----------
    train : list of int64 arrays
        Each client's training examples.
    held_out : int64 array
        Training examples that nobody trains on; empty where none are held out.
    test : list of int64 arrays, or None
        Each client's test examples, where the data say whose they are.
    of_clients : tuple of str
        Which of ``test`` and ``validation`` are clients' own examples, in a private run: metrics of
        them are not covered by its guarantee.
    """

    train: list[Indices]
    held_out: Indices
    test: list[Indices] | None = None
    of_clients: tuple[str, ...] = ()


def load_dataset(config: RunConfig) -> Dataset:
    """The examples that a config names."""
    data = config.data
    return datasets.load(
        data.name,
        directory=data.dir,
        download=data.download,
        normalize=data.normalize,
        train=data.train,
        test=data.test,
        protected=config.private or config.client.private,
        **settings_for(data, find(data), ("path", "directory", "download", "normalize")),
    )


def deal(config: RunConfig, partition: partitions.Partition, dataset: Dataset) -> Dealt:
    """Hold examples out, and deal the others to clients.

    Raises
    ------
    FedsimError
        If they cannot be dealt this way, or a private run would find or show what it must not.
    """
    train, test = dataset.train, dataset.test
    if config.evaluate.every and not len(test):
        raise FedsimError(
            f"evaluate.every = {config.evaluate.every}; it must be 0, since {dataset.name} has no "
            "test examples."
        )
    private = config.private or config.client.private
    owners = train.columns.get(getattr(partition, "column", "owner"))
    of_clients = _of_clients(config, partition, dataset) if private else ()
    rest, held_out = np.arange(len(train)), np.zeros(0, dtype=np.int64)
    if config.data.validation:
        rest, held_out = partitions.hold_out(
            config.data.validation, len(train), owners, seed=config.seed
        )
    targets = train.y.cpu().numpy()[rest]
    columns = {name: column[rest] for name, column in train.columns.items()}
    parts = [rest[indices] for indices in partition.indices(targets, columns)]
    if len(parts) != config.partition.clients:
        raise FedsimError(
            f"{partition} deals examples to {len(parts)} clients, and partition.clients = "
            f"{config.partition.clients}, the declared population; they must be the same."
        )
    if private and isinstance(partition, partitions.ByOwner):
        partition.require_every_client_an_owner(columns)
    if config.partition.max_examples:
        parts = partitions.subsample(parts, config.partition.max_examples, seed=config.seed)
    # Nobody evaluates on one whose label is none.
    held_out = held_out[~train.columns.get(UNUSABLE, np.zeros(len(train), np.bool_))[held_out]]
    return Dealt(parts, held_out, partition.test_indices(columns, test.columns), of_clients)


def _of_clients(
    config: RunConfig, partition: partitions.Partition, dataset: Dataset
) -> tuple[str, ...]:
    """Splits for evaluation whose examples belong to a private run's clients.

    Raises
    ------
    FedsimError
        If their metrics, which have no noise, would be shown and may not.
    """
    column = getattr(partition, "column", "owner")
    if column not in dataset.train.columns:
        return ()
    splits: list[str] = []
    if _clients_own_test_examples(dataset, column):
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


def refuse_found(dataset: Dataset, partition: partitions.Partition) -> None:
    """Refuse what was found in clients' examples, where a private run protects these.

    Raises
    ------
    FedsimError
    """
    column = getattr(partition, "column", "owner")
    for key, split in dataset.found_in.items():
        if split == "test" and not _clients_own_test_examples(dataset, column):
            continue
        noun = "classes" if key == "classes" else "tokens"
        told = {
            "train": f"{dataset.name} has no test examples that tell how many {noun} there are",
            "test": f"the test examples of {dataset.name}, which tell how many {noun} there are, "
            f"belong to clients (column {column})",
        }[split]
        raise FedsimError(
            f"data.{key} is not set, and {told}: in a private run their number is not found in "
            f"clients' data; it must be declared, as data.{key} or by the file itself."
        )


def _clients_own_test_examples(dataset: Dataset, column: str) -> bool:
    """Whether a test example has the owner of a training example."""
    owners, theirs = (split.columns.get(column) for split in (dataset.train, dataset.test))
    return owners is not None and theirs is not None and bool(np.isin(theirs, owners).any())

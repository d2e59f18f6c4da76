"""Use fedsim's partitioners in `flwr_datasets`, and its partitioners in fedsim.

Needs the package ``flwr-datasets`` (the extra ``flwr-datasets``), which takes seconds to import
and so is imported on first use.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedsim import optional_packages
from fedsim.array_types import Ints
from fedsim.errors import FedsimError
from fedsim.partitions.base import Examples, Partition


def for_flower(partition: Partition, partition_by: str = "label") -> Any:
    """A `flwr_datasets` partitioner that assigns examples as a fedsim partition does.

    Parameters
    ----------
    partition : Partition
    partition_by : str
        Column of the data set that holds the labels.

    Returns
    -------
    flwr_datasets.partitioner.Partitioner
        For use in a `FederatedDataset`, or on its own once its ``dataset`` is set.

    Raises
    ------
    FedsimError
        If flwr-datasets is not installed.
    """
    base = _flower_base()

    class Ours(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self._client_indices: list[Ints] | None = None

        @property
        def num_partitions(self) -> int:
            return partition.clients

        def load_partition(self, partition_id: int) -> Any:
            if self._client_indices is None:
                self._client_indices = partition.indices(np.asarray(self.dataset[partition_by]))
            return self.dataset.select(self._client_indices[partition_id])

    return Ours()


@dataclass(frozen=True)
class FromFlower(Partition):
    """A partition that uses a `flwr_datasets` partitioner.

    Parameters
    ----------
    partitioner : flwr_datasets.partitioner.Partitioner
        Without a data set; it is copied for every use. It draws from its own seed.
    clients : int
        Number of its partitions.
    partition_by : str
        The column from which it takes labels.
    """

    depends_on_seed: ClassVar[bool] = False
    title_format: ClassVar[str] = "Flower's {0.partitioner.__class__.__name__}"
    partitioner: Any
    clients: int
    partition_by: str = "label"
    seed: int = 0

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Ints]:
        """Positions of each client's examples, as Flower's partitioner assigns them."""
        del generator
        labels = examples.labels
        _flower_base()
        from datasets import Dataset

        partitioner = copy.deepcopy(self.partitioner)
        columns = {self.partition_by: labels, "position": np.arange(len(labels))}
        partitioner.dataset = Dataset.from_dict(columns)
        if partitioner.num_partitions != self.clients:
            raise FedsimError(
                f"clients is {self.clients}; it must be {partitioner.num_partitions}, the number "
                f"of partitions of {type(partitioner).__name__}."
            )
        return [
            np.asarray(partitioner.load_partition(client)["position"], dtype=np.int64)
            for client in range(self.clients)
        ]


def _flower_base() -> Any:
    optional_packages.require("this partition", "flwr_datasets")
    from flwr_datasets.partitioner import Partitioner

    return Partitioner

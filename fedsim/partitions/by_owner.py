"""The natural partition: every owner of examples is a client."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.partitions.base import Columns, Examples, Indices, Partition
from fedsim.registry import register

_log = logging.getLogger("fedsim")


@register("partition", "by-owner")
@dataclass(frozen=True)
class ByOwner(Partition):
    """Client k has the examples of the k-th owner, owners in increasing order.

    Owners are numbers or strings, one per example. The owners of training examples are the
    clients; if there are fewer than ``clients``, the last clients have no examples. A test example
    goes to its owner's client, and to no client if its owner has no training examples.

    Parameters
    ----------
    clients : int
        At least the number of owners. In a private run it is a declared number, which must equal
        the number of owners.
    seed : int
        Not used: nothing is drawn.
    """

    drawn: ClassVar[bool] = False
    words: ClassVar[str] = "by {0.column}"
    clients: int = 100
    column: str = "owner"
    """The column of the data that has the owner of each example."""
    seed: int = 0

    def owners(self, columns: Columns) -> npt.NDArray[Any]:
        """Owners of the training examples, in the order of clients.

        Raises
        ------
        FedsimError
            If there are more owners than clients, or an owner is NaN or infinite.
        """
        owners = np.unique(columns[self.column])
        if owners.dtype.kind == "f" and not np.isfinite(owners).all():
            raise FedsimError(
                f"the column {self.column} holds NaN or infinite numbers; each example must have "
                "an owner, a number or a string."
            )
        if len(owners) > self.clients:
            raise FedsimError(
                f"partition.clients is {self.clients}, but the training examples have "
                f"{len(owners)} owners (column {self.column}); it must be {len(owners)}."
            )
        return owners

    def require_every_client_an_owner(self, columns: Columns) -> None:
        """Require exactly ``clients`` owners: a private run must not find their number in data.

        Raises
        ------
        FedsimError
        """
        if len(self.owners(columns)) != self.clients:
            raise FedsimError(
                f"partition.clients is {self.clients}, but the training examples have fewer owners "
                f"(column {self.column}); in a private run the number of clients is declared, and "
                "each must own examples."
            )

    def test_indices(self, columns: Columns, test_columns: Columns) -> list[Indices] | None:
        """Positions of each client's test examples; None if these have no column of owners."""
        if self.column not in test_columns:
            return None
        return self._positions_by_owner(self.owners(columns), test_columns[self.column])

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Indices]:
        """Positions of each owner's examples."""
        column = examples.column(self.column)
        owners = self.owners({self.column: column})
        if len(owners) < self.clients:
            _log.warning(
                "partition.clients is %s, but the training examples have %s owners (column %s): "
                "the last %s clients have no examples.",
                self.clients, len(owners), self.column, self.clients - len(owners),
            )  # fmt: skip
        return self._positions_by_owner(owners, column)

    def _positions_by_owner(
        self, owners: npt.NDArray[Any], column: npt.NDArray[Any]
    ) -> list[Indices]:
        """Positions of each owner in ``column``; empty for clients beyond the owners."""
        if (owners.dtype.kind in "US") != (column.dtype.kind in "US"):
            raise FedsimError(
                f"the column {self.column} is {owners.dtype} for training examples but "
                f"{column.dtype} for test examples; it must be numbers in both, or strings in both."
            )
        # searchsorted also gives unknown owners a position (len(owners) after the last): keep
        # only examples whose owner is really the one at that position.
        client = np.searchsorted(owners, column)
        known = np.flatnonzero(owners[np.minimum(client, len(owners) - 1)] == column)
        order = known[np.argsort(client[known], kind="stable")]
        sizes = np.bincount(client[known], minlength=self.clients)
        return np.split(order.astype(np.int64), np.cumsum(sizes)[:-1])

"""The natural partition: every owner of examples is a client."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsim.array_types import Ints
from fedsim.errors import FedsimError
from fedsim.partitions.base import Columns, Examples, Partition
from fedsim.registry import register

_log = logging.getLogger("fedsim")


@register("partition", "by-owner")
@dataclass(frozen=True)
class ByOwner(Partition):
    """Client k has the examples of the k-th owner, owners in increasing order.

    Owners are numbers or strings, one per example; strings that spell integers are in the order of
    these, before all others. The owners of training examples are the clients; if there are fewer
    than ``clients``, the last clients have no examples. A test example goes to its owner's client,
    and to no client if its owner has no training examples.

    Parameters
    ----------
    clients : int
        At least the number of owners. In a private run it is a declared number, which must equal
        the number of owners.
    seed : int
        Not used: nothing is drawn.
    """

    depends_on_seed: ClassVar[bool] = False
    title_format: ClassVar[str] = "by {0.column}"
    clients: int = 100
    column: str = "owner"
    """The column of the data that has the owner of each example."""
    seed: int = 0

    def owners(self, columns: Columns) -> npt.NDArray[Any]:
        """Owners of the training examples, in the order of clients.

        Raises
        ------
        FedsimError
            If there are more owners than clients, or an example has none.
        """
        if not has_owner(columns[self.column]).all():
            raise FedsimError(
                f"the column {self.column} holds NaN, infinite numbers or empty strings; each "
                "example must have an owner, a number or a string."
            )
        owners = np.unique(columns[self.column])
        if _is_text(owners):  # whose place thus does not depend on what other owners are called
            owners = np.array(sorted(owners.tolist(), key=owner_order), dtype=owners.dtype)
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

    def test_indices(self, columns: Columns, test_columns: Columns) -> list[Ints] | None:
        """Positions of each client's test examples; None if these have no column of owners."""
        if self.column not in test_columns:
            return None
        return self._positions_by_owner(self.owners(columns), test_columns[self.column])

    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Ints]:
        """Positions of each owner's examples."""
        column = examples.column(self.column)
        owners = self.owners({self.column: column})
        if len(owners) < self.clients:
            _log.warning(
                "partition.clients is %s, but the training examples have %s owners (column %s): "
                "the last %s clients have no examples, unless partition.clients is %s.",
                self.clients,
                len(owners),
                self.column,
                self.clients - len(owners),
                len(owners),
            )
        return self._positions_by_owner(owners, column)

    def _positions_by_owner(self, owners: npt.NDArray[Any], column: npt.NDArray[Any]) -> list[Ints]:
        """Positions of each owner in ``column``; empty for clients beyond the owners."""
        if _is_text(owners) != _is_text(column):
            raise FedsimError(
                f"the column {self.column} is {owners.dtype} for training examples but "
                f"{column.dtype} for test examples; it must be numbers in both, or strings in both."
            )
        # searchsorted also gives unknown owners a position (len(owners) after the last): keep
        # only examples whose owner is really the one at that position.
        sorter = np.argsort(owners)
        place = np.searchsorted(owners, column, sorter=sorter)
        client = sorter[np.minimum(place, len(owners) - 1)]
        known = np.flatnonzero(owners[client] == column)
        order = known[np.argsort(client[known], kind="stable")]
        sizes = np.bincount(client[known], minlength=self.clients)
        return np.split(order.astype(np.int64), np.cumsum(sizes)[:-1])


def has_owner(column: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which examples ``[N]`` have an owner: a finite number, or a string that is not empty."""
    if column.dtype.kind == "f":
        return np.asarray(np.isfinite(column))
    if _is_text(column):
        return np.asarray(column != (b"" if column.dtype.kind == "S" else ""), dtype=np.bool_)
    return np.ones(len(column), dtype=np.bool_)


def _is_text(owners: npt.NDArray[Any]) -> bool:
    return owners.dtype.kind in "USO"


def owner_order(owner: str | bytes) -> tuple[bool, int, str | bytes]:
    """Sort key of owners: integers in their order, then all other texts in theirs."""
    try:
        return False, int(owner), owner
    except ValueError:
        return True, 0, owner

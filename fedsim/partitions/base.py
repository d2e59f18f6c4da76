"""Base class of partitions, drawing of subsets and validation examples, and class counts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsim.arguments import check_arguments
from fedsim.array_types import Floats, Ints
from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness
from fedsim.settings import check_settings

Columns = Mapping[str, npt.NDArray[Any]]
"""Columns by name, with one value per example ``[N]``, for example ``owner``."""

# Parts of Purpose.PARTITION; the partitioners' own draws are part 0.
SUBSAMPLE, HOLD_OUT = 1, 2


@dataclass(frozen=True, eq=False)
class Examples:
    """The view of examples that a partitioner gets: targets and columns, without inputs.

    Attributes
    ----------
    targets : array ``[N, ...]``
    columns : mapping of name to array ``[N]``

    Raises
    ------
    FedsimError
        If there are no examples, or a column has another length.
    """

    targets: npt.NDArray[Any]
    columns: Columns = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not np.ndim(self.targets) or not len(self.targets):
            raise FedsimError(
                f"the examples to partition have targets of shape {np.shape(self.targets)}; they "
                "must be [N, ...] with N at least 1."
            )
        for name, column in self.columns.items():
            if column.shape != (len(self),):
                raise FedsimError(
                    f"the column {name} of the examples to partition has shape {column.shape}; it "
                    f"must have one value for each of the {len(self)} examples."
                )

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def labels(self) -> Ints:
        """Class of each example, int64 ``[N]``, 0 or above.

        Raises
        ------
        FedsimError
            If the targets are not classes.
        """
        array = self.targets
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise FedsimError(
                f"the labels to partition have shape {array.shape} and dtype {array.dtype}; they "
                "must be integers [N] with N at least 1. For other targets there are the "
                "partitions 'iid' and 'by-owner'."
            )
        if int(array.min()) < 0:
            raise FedsimError(
                f"the label {int(array.min())} is negative; labels must be 0 or above."
            )
        return array.astype(np.int64)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Values ``[N]`` of a column.

        Raises
        ------
        FedsimError
            If there is no column of this name.
        """
        if name not in self.columns:
            raise FedsimError(
                f"partition.column is '{name}', but the training examples have "
                f"{', '.join(self.columns) or 'no columns'}; the data must have "
                f"{name}_train (a table names its columns in data.columns, as in 'owner=hospital')."
            )
        return self.columns[name]


CLIENTS_AT_A_TIME = 10_000


class Partition(ABC):
    """Assigns training examples to clients.

    Subclasses are frozen dataclasses with the fields ``clients`` (their number) and ``seed`` (for
    all draws), and implement `deal`.

    Attributes
    ----------
    depends_on_seed : bool
        Whether the assignment depends on the seed. If so, runs of different seeds have different
        clients, so that their privacy costs cannot be composed for one client.
    title_format : str
        Name in headings, with fields as ``{0.field}``; empty for the class's name.
    """

    depends_on_seed: ClassVar[bool] = True
    title_format: ClassVar[str] = ""
    clients: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("clients", "seed"):
            if not hasattr(self, name):
                raise FedsimError(
                    f"partition.name names {type(self).__name__}, which has no {name}; a partition "
                    "must have the fields clients and seed."
                )
        check_settings(self, "partition.")
        require_clients(self.clients)
        Randomness(self.seed)  # refuses a seed out of range

    def indices(self, targets: npt.ArrayLike, columns: Columns | None = None) -> list[Ints]:
        """Assign the examples: the positions of each client's examples.

        Parameters
        ----------
        targets : ``[N, ...]``
            Targets of the training examples: classes 0, 1, ... for partitioners that use them.
        columns : mapping of name to array ``[N]``, optional
            Further values per example, such as its ``owner``.

        Returns
        -------
        list of int64 ``[n_c]``
            Sorted positions in 0 .. N - 1 for client 0, 1, ...; disjoint.

        Raises
        ------
        FedsimError
            If the examples cannot be assigned in this way, or `deal` returns a position that does
            not exist or one that two clients share, which would void the example-level guarantee.
        """
        generator = Randomness(self.seed).generator(Purpose.PARTITION, level="run")
        examples = Examples(np.asarray(targets), columns or {})
        dealt = self.deal(examples, generator)
        if not isinstance(dealt, Iterable):
            raise FedsimError(
                f"partition.name names {type(self).__name__}, whose deal gives a "
                f"{type(dealt).__name__}; it must give the positions of each client's examples."
            )
        by_client = [np.sort(np.asarray(indices)) for indices in dealt]
        _require_disjoint(by_client, len(examples), type(self).__name__)
        return [indices.astype(np.int64, copy=False) for indices in by_client]

    def test_indices(self, columns: Columns, test_columns: Columns) -> list[Ints] | None:
        """Positions of each client's test examples; None if columns do not say who owns them.

        Parameters
        ----------
        columns, test_columns : mapping of name to array
            Columns of the training and of the test examples.
        """
        return None

    @property
    def title(self) -> str:
        """Name, parameters and number of clients, for a heading."""
        words = (self.title_format or type(self).__name__).format(self)
        return f"{words}, {self.clients:,} client{'s' * (self.clients != 1)}"

    @abstractmethod
    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Ints]:
        """Positions of each client's examples, in any order: ``clients`` disjoint arrays.

        Parameters
        ----------
        examples : Examples
            Targets (as classes: ``examples.labels``) and columns.
        generator : numpy Generator
            Seeded with ``seed``; every draw must come from it.
        """


def _require_disjoint(by_client: Sequence[Ints], count: int, name: str) -> None:
    """Refuse positions outside 0 .. count - 1, and positions that occur twice."""
    covered = np.zeros(count, dtype=np.bool_)
    total = 0
    # In blocks of clients: one call per client is slow, and one concatenation copies everything.
    for first in range(0, len(by_client), CLIENTS_AT_A_TIME):
        clients = [
            indices for indices in by_client[first : first + CLIENTS_AT_A_TIME] if indices.size
        ]
        if not clients:
            continue
        positions = np.concatenate(clients)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise FedsimError(
                f"partition.name names {name}, which deals {positions.dtype} {positions.shape}; it "
                "must deal whole numbers, the positions of each client's examples."
            )
        if int(positions.min()) < 0 or int(positions.max()) >= count:
            raise FedsimError(
                f"partition.name names {name}, which deals the examples {positions.min()} to "
                f"{positions.max()}; there are only 0 to {count - 1}."
            )
        covered[positions] = True
        total += len(positions)
    if twice := total - int(covered.sum()):
        raise FedsimError(
            f"partition.name names {name}, which deals {twice} examples twice; each must belong to "
            "one client."
        )


@check_arguments
def subsample(client_indices: Sequence[Ints], at_most: int, *, seed: int) -> list[Ints]:
    """Keep ``at_most`` examples of each client, drawn uniformly without replacement.

    A client's draw depends only on the seed, its id and its own examples. Use it for a smaller
    version of an experiment, such as five clients with 500 images each.
    """
    if at_most < 1:
        raise FedsimError(
            f"at most {at_most} examples are kept of each client; it must be at least 1."
        )
    randomness = Randomness(seed)

    def keep(client: int, indices: Ints) -> Ints:
        if len(indices) <= at_most:
            return indices
        generator = randomness.generator(
            Purpose.PARTITION, level="run", client=client, part=SUBSAMPLE
        )
        return np.sort(generator.choice(indices, size=at_most, replace=False))

    return [keep(client, indices) for client, indices in enumerate(client_indices)]


def require_clients(clients: int, at_least: int = 1, why: str = "") -> None:
    """Refuse a number of clients below ``at_least``."""
    if clients < at_least:
        raise FedsimError(f"partition.clients is {clients}; it must be at least {at_least}{why}.")


def require_enough(clients: int, examples: int) -> None:
    """Refuse more clients than examples, for partitions that give every client an example."""
    if clients > examples:
        raise FedsimError(
            f"partition.clients is {clients}, but there are only {examples} training examples; "
            f"it must be at most {examples}, so that every client has one."
        )


def by_class(labels: Ints) -> list[Ints]:
    """Positions of the examples of each class 0 .. max, in increasing order; some may be empty."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels))[:-1])


@check_arguments
def hold_out(
    amount: float, examples: int, owners: npt.NDArray[Any] | None = None, *, seed: int
) -> tuple[Ints, Ints]:
    """Draw validation examples uniformly from the training examples.

    Every owner keeps at least one example to train on (its last one in the drawn order), so that
    holding out does not change who is a client.

    Parameters
    ----------
    amount : float
        Below 1, the share of the examples to hold out, rounded down; otherwise their number.
    examples : int
        Number of training examples, N.
    owners : array ``[N]``, optional
        Owner of each example.
    seed : int

    Returns
    -------
    int64 ``[N - k]`` and int64 ``[k]``
        Sorted positions of the examples that remain, and of those held out.

    Raises
    ------
    FedsimError
        If the amount comes to no examples, or to more than can be held out.
    """
    generator = Randomness(seed).generator(Purpose.PARTITION, level="run", part=HOLD_OUT)
    order = generator.permutation(examples)
    # NaN, a negative number and infinity hold out none, which is refused below.
    number = amount * examples + 1e-9 if amount < 1 else amount
    count = int(number) if 0 < number < math.inf else 0
    if owners is None:
        free = order[:-1]
    elif np.shape(owners) != (examples,):
        raise FedsimError(
            f"owners has the shape {np.shape(owners)}; it must be one for each of {examples} "
            "examples."
        )
    else:
        # `unique` returns the first position of each owner; reversed, that is its last one drawn.
        last_drawn = np.unique(owners[order[::-1]], return_index=True)[1]
        free = np.delete(order[::-1], last_drawn)[::-1]
    if not 1 <= count <= len(free):
        raise FedsimError(
            f"data.validation is {amount:g}, which holds out {count} of {examples} training "
            f"examples; it must hold out at least 1 and at most {len(free)}, "
            f"{'all but one' if owners is None else 'all but one of each owner'}."
        )
    validation = np.sort(free[:count])
    return np.setdiff1d(np.arange(examples), validation, assume_unique=True), validation


def class_counts(labels: Ints, client_indices: Sequence[Ints], num_classes: int) -> Ints:
    """Count the examples of each class that each client has, int64 ``[n, num_classes]``."""
    owner = np.repeat(np.arange(len(client_indices)), [*map(len, client_indices)])
    cell = owner * num_classes + labels[np.concatenate(client_indices)]
    counts = np.bincount(cell, minlength=len(client_indices) * num_classes)
    return counts.reshape(len(client_indices), num_classes).astype(np.int64)


def class_shares(counts: Ints) -> Floats:
    """Each client's fraction of every class ``[n, K]``; zeros for an empty client."""
    shares: Floats = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares


def by_largest_class(counts: Ints) -> Ints:
    """Order of clients by their largest class, then by its share (descending); empty ones last."""
    n, num_classes = counts.shape
    # Ties between classes are broken by the client's id, so that they favour no class.
    turn = (np.arange(n)[:, None] - np.arange(num_classes)) % num_classes
    largest = (counts * num_classes + turn).argmax(1)
    largest[counts.sum(1) == 0] = num_classes
    order: Ints = np.lexsort((-class_shares(counts).max(1), largest))
    return order

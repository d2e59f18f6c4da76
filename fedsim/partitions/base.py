"""What a partition is, what is kept of the training examples, and which classes clients have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness
from fedsim.settings import check_settings

Indices = npt.NDArray[np.int64]
Columns = Mapping[str, npt.NDArray[Any]]
"""By name one value an example, ``[N]``: ``owner``, say."""

SUBSAMPLE, HOLD_OUT = 1, 2  # parts of Purpose.PARTITION that the partitioners' own draws do not use


@dataclass(frozen=True, eq=False)
class Examples:
    """What a partitioner sees of examples: their targets and columns, never their inputs.

    Attributes
    ----------
    targets : array ``[N, ...]``
    columns : mapping of name to array ``[N]``

    Raises
    ------
    FedsimError
        If there are none, or a column has another length.
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
    def labels(self) -> Indices:
        """The class of each example, int64 ``[N]``, 0 or above.

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
        """The values of a column.

        Raises
        ------
        FedsimError
            If there is none of this name.
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
    """Deals training examples to clients.

    Subclasses are frozen dataclasses with the fields ``clients`` (how many there are) and
    ``seed`` (of every draw), and say in `deal` whose each example is.

    Attributes
    ----------
    drawn : bool
        Whether the seed decides whose an example is. Runs of other seeds have other clients then,
        and what they release about a client does not add up.
    words : str
        What headings call it, with its fields as ``{0.field}``; empty for the class's name.
    """

    drawn: ClassVar[bool] = True
    words: ClassVar[str] = ""
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

    def indices(self, targets: npt.ArrayLike, columns: Columns | None = None) -> list[Indices]:
        """Each client's examples.

        Parameters
        ----------
        targets : ``[N, ...]``
            Of the training examples: their classes 0, 1, ..., for partitioners that look at them.
        columns : mapping of name to array ``[N]``, optional
            What else is known of each example, such as its ``owner``.

        Returns
        -------
        list of int64 ``[n_c]``
            Sorted positions for client 0, 1, ..., of 0 .. N - 1: disjoint.

        Raises
        ------
        FedsimError
            If the examples cannot be dealt in this way, or `deal` gives one that there is not, or
            one to two clients, whom no guarantee for an example would then cover.
        """
        generator = Randomness(self.seed).generator(Purpose.PARTITION, level="run")
        examples = Examples(np.asarray(targets), columns or {})
        parts = self.deal(examples, generator)
        if not isinstance(parts, Iterable):
            raise FedsimError(
                f"partition.name names {type(self).__name__}, whose deal gives a "
                f"{type(parts).__name__}; it must give the positions of each client's examples."
            )
        dealt = [np.sort(np.asarray(indices)) for indices in parts]
        _require_disjoint(dealt, len(examples), type(self).__name__)
        return [indices.astype(np.int64, copy=False) for indices in dealt]

    def test_indices(self, columns: Columns, test_columns: Columns) -> list[Indices] | None:
        """Each client's test examples, where columns tell whose they are; None where not.

        Parameters
        ----------
        columns, test_columns : mapping of name to array
            Of the training and of the test examples.
        """
        return None

    @property
    def title(self) -> str:
        """Name, parameters and number of clients, for a heading."""
        words = (self.words or type(self).__name__).format(self)
        return f"{words}, {self.clients:,} client{'s' * (self.clients != 1)}"

    @abstractmethod
    def deal(self, examples: Examples, generator: np.random.Generator) -> Sequence[Indices]:
        """Positions of each client's examples, in any order: disjoint, ``clients`` of them.

        Parameters
        ----------
        examples : Examples
            Their targets, classes as ``examples.labels``, and columns.
        generator : numpy Generator
            Follows from ``seed``; every draw comes from it.
        """


def _require_disjoint(dealt: Sequence[Indices], count: int, name: str) -> None:
    """Refuse positions that are not 0 .. count - 1, or come twice."""
    covered = np.zeros(count, dtype=np.bool_)
    total = 0
    # A few clients' together: neither a call a client, nor a copy of all.
    for first in range(0, len(dealt), CLIENTS_AT_A_TIME):
        clients = [indices for indices in dealt[first : first + CLIENTS_AT_A_TIME] if indices.size]
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
            f"partition.name names {name}, which deals {twice} examples twice; "
            "each must be one client's."
        )


@check_arguments
def subsample(parts: Sequence[Indices], at_most: int, *, seed: int) -> list[Indices]:
    """Keep ``at_most`` examples of each client, drawn uniformly without replacement.

    A client's draw depends on the seed, its id and its own examples only. For a smaller
    version of a job: five clients of 500 images, say.
    """
    if at_most < 1:
        raise FedsimError(
            f"the examples kept of each client are {at_most}; they must be at least 1."
        )
    randomness = Randomness(seed)

    def keep(client: int, indices: Indices) -> Indices:
        if len(indices) <= at_most:
            return indices
        generator = randomness.generator(
            Purpose.PARTITION, level="run", client=client, part=SUBSAMPLE
        )
        return np.sort(generator.choice(indices, size=at_most, replace=False))

    return [keep(client, indices) for client, indices in enumerate(parts)]


def require_clients(clients: int, at_least: int = 1, why: str = "") -> None:
    """Refuse a number of clients below ``at_least``."""
    if clients < at_least:
        raise FedsimError(f"partition.clients is {clients}; it must be at least {at_least}{why}.")


def require_enough(clients: int, examples: int) -> None:
    """Refuse more clients than examples, where each client is to have one."""
    if clients > examples:
        raise FedsimError(
            f"partition.clients is {clients}, but there are only {examples} training examples; "
            f"it must be at most {examples}, so that every client has one."
        )


def by_class(labels: Indices) -> list[Indices]:
    """Positions of each class 0 .. max, in increasing order; a class may have none."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels))[:-1])


def hold_out(
    amount: float, examples: int, owners: npt.NDArray[Any] | None = None, *, seed: int
) -> tuple[Indices, Indices]:
    """Draw validation examples uniformly from the training examples.

    An owner of examples always keeps one to train on, so that holding out changes nobody's being a
    client: it is the last of its examples in the order drawn.

    Parameters
    ----------
    amount : float
        Below 1 a share of the examples, rounded down; else their number.
    examples : int
        How many there are.
    owners : array ``[N]``, optional
        Whose they are.
    seed : int

    Returns
    -------
    int64 ``[N - k]`` and int64 ``[k]``
        Sorted positions of those that stay, and of those that are held out.

    Raises
    ------
    FedsimError
        If there are not so many to hold out, or none at all.
    """
    generator = Randomness(seed).generator(Purpose.PARTITION, level="run", part=HOLD_OUT)
    order = generator.permutation(examples)
    count = int(amount * examples + 1e-9) if amount < 1 else int(amount)
    if owners is None:
        free = order[:-1]
    else:
        # `unique` finds the first of each owner, in an order that begins with the last drawn.
        last_drawn = np.unique(owners[order[::-1]], return_index=True)[1]
        free = np.delete(order[::-1], last_drawn)[::-1]
    if not 1 <= count <= len(free):
        raise FedsimError(
            f"data.validation is {amount:g}, which holds out {count} of {examples} training "
            f"examples; it must hold out at least 1 and at most {len(free)}, "
            f"{'all but one' if owners is None else 'all but one of each owner'}."
        )
    held = np.sort(free[:count])
    return np.setdiff1d(np.arange(examples), held, assume_unique=True), held


Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def class_counts(labels: Indices, parts: Sequence[Indices], num_classes: int) -> Counts:
    """Count the examples of each class that each client has, int64 ``[n, num_classes]``."""
    owner = np.repeat(np.arange(len(parts)), [len(indices) for indices in parts])
    cell = owner * num_classes + labels[np.concatenate(parts)]
    counts = np.bincount(cell, minlength=len(parts) * num_classes)
    return counts.reshape(len(parts), num_classes).astype(np.int64)


def class_shares(counts: Counts) -> Floats:
    """Each client's fraction of every class ``[n, K]``; zeros for an empty client."""
    shares: Floats = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares


def by_largest_class(counts: Counts) -> Indices:
    """Clients in order of their largest class, the purest first; empty ones last."""
    n, num_classes = counts.shape
    # Among equal counts a client takes one by its id, so that ties favour no class.
    turn = (np.arange(n)[:, None] - np.arange(num_classes)) % num_classes
    largest = (counts * num_classes + turn).argmax(1)
    largest[counts.sum(1) == 0] = num_classes
    order: Indices = np.lexsort((-class_shares(counts).max(1), largest))
    return order

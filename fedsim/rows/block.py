"""Blocks, the replies of several clients; and the interface of a trainer of blocks of clients.

Blocks are passed from engines to strategies. `BlockTrainer` is the interface that engines use. With
a round's parameters a trainer receives config entries (`BlockTrainer.receive`):

- `KEEP_SINCE`: clients keep their state on disk, and the run may return to the end of this round:
  states from then on must not be deleted.
- `RUN`: id of the run, the same after a resume, and different for every other run. By it clients
  recognise rounds that they have already trained in, and their own state of this run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, Self, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.array_types import Ints

Reason = Literal[
    "missing",
    "raised",
    "budget",
    "timeout",
    "malformed",
    "non-finite",
    "duplicate",
    "unknown",
]
"""Why a client contributes nothing to a round. A row too large to be summed is "non-finite"."""
REASONS: tuple[Reason, ...] = get_args(Reason)


class MalformedBlockError(ValueError):
    """The parts of a block are inconsistent, or it is not the block that was requested."""


@dataclass(frozen=True)
class Block:
    """Replies of ``n`` clients, and the reasons of those that failed.

    Attributes
    ----------
    client_ids : int64 ``[n]``
        Ints, each at most once.
    rows : Tensor ``[n, d]`` or None
        Updates ``w_client - w_global`` in the layout's order; zeros for a client that failed.
        None for an evaluation, or if all clients failed.
    metrics : mapping of name to float64 ``[n]``
        Metrics of each client: ``num-examples``, ``loss``, ``accuracy`` and further ones of the
        algorithm. Those of a failed client are meaningless.
    ok : bool ``[n]``
        False for a client that failed.
    reasons : mapping of client id to Reason
        Reason of each failure.
    usable : bool Tensor ``[n]`` or None
        Set if the worker has bounded and summed the rows itself: which of them are in its sum.
        ``rows`` is then None.

    Raises
    ------
    MalformedBlockError
        If the parts are inconsistent.
    """

    client_ids: Ints
    rows: Tensor | None
    metrics: Mapping[str, npt.NDArray[np.float64]]
    ok: npt.NDArray[np.bool_]
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    usable: Tensor | None = None

    def __post_init__(self) -> None:
        # Engines, nodes and users' trainers make blocks. In an inconsistent one a row could count
        # for another client, or one client's failure for all.
        ids = self.client_ids
        _require_array("client_ids", ids, np.int64, None)
        n = len(ids)
        _require_array("ok", self.ok, np.bool_, n)
        for name, values in self.metrics.items():
            _require_array(f"metrics['{name}']", values, np.float64, n)
        failed = ids[~self.ok].tolist()
        if len(set(ids.tolist())) != n:
            raise MalformedBlockError(f"client_ids are {ids.tolist()}; each may be there once.")
        if set(self.reasons) != set(failed) or not set(self.reasons.values()) <= set(REASONS):
            raise MalformedBlockError(
                f"reasons are {dict(self.reasons)} and clients {failed} failed; each of them, and "
                f"no other, must have one of {', '.join(REASONS)}."
            )
        if self.usable is not None and (self.rows is not None or self.usable.shape != (n,)):
            raise MalformedBlockError(f"usable is {list(self.usable.shape)}; it must be [{n}].")
        if self.rows is None:
            return
        if self.rows.shape[:-1] != (n,) or not self.rows.is_floating_point():
            raise MalformedBlockError(
                f"rows are {self.rows.dtype} {list(self.rows.shape)}; they must be floating point "
                f"[{n}, d]."
            )
        if failed and bool(self.rows[torch.from_numpy(~self.ok)].count_nonzero()):
            raise MalformedBlockError(f"clients {failed} failed, so that their rows must be zero.")

    @classmethod
    def failed(cls, client_ids: Ints, reason: Reason) -> Block:
        """Block of clients that have all failed for the same reason."""
        reasons = dict.fromkeys(client_ids.tolist(), reason)
        return cls(client_ids, None, {}, np.zeros(len(client_ids), dtype=np.bool_), reasons)

    @classmethod
    def sent(
        cls, client_ids: Ints, rows: Tensor | None, metrics: Mapping[str, npt.NDArray[np.float64]]
    ) -> Block:
        """Block of clients without failures."""
        return cls(client_ids, rows, metrics, np.ones(len(client_ids), dtype=np.bool_))

    def select(self, keep: npt.NDArray[np.bool_]) -> Block:
        """Block of the clients for which ``keep [n]`` is True."""
        ids = self.client_ids[keep]
        return Block(
            client_ids=ids,
            rows=None if self.rows is None else self.rows[torch.from_numpy(keep)],
            metrics={name: values[keep] for name, values in self.metrics.items()},
            ok=self.ok[keep],
            reasons={k: self.reasons[k] for k in ids.tolist() if k in self.reasons},
            usable=None if self.usable is None else self.usable[torch.from_numpy(keep)],
        )


def _require_array(name: str, values: object, dtype: type[np.generic], n: int | None) -> None:
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype != dtype:
        raise MalformedBlockError(f"{name} of a block must be an array {dtype.__name__} [n].")
    if n is not None and len(values) != n:
        raise MalformedBlockError(f"{name} of a block has {len(values)} entries for {n} clients.")


KEEP_SINCE = "keep-since"
RUN = "run"
DECLARED_EXAMPLES = "declared-examples"
"""Config entry: a client's declared number of examples, if its update is weighted by it."""

CLIENT_IDS = "client_ids"

ClientStates = Mapping[str, Tensor]
"""State between rounds: `CLIENT_IDS`, int64 ``[m]``, and by name these clients' ``[m, ...]``."""


@runtime_checkable
class BlockTrainer(Protocol):
    """Interface that engines use: a client algorithm with its clients' data, run block by block.

    `train` and `evaluate` yield each client in one block, in any order, of a size that fits memory
    and cache, and compute nothing before they are iterated. A client's part of a block depends on
    no other client in it. If a block raises, its clients are trained again in smaller blocks: a
    client's state must therefore change only when its block is complete.

    A subclass needs `population`, `train` and `evaluate`; the methods that it inherits are those of
    a trainer on the CPU without state.

    Attributes
    ----------
    population : int
        Number of clients; their ids are 0 .. population - 1.
    device : torch.device
        Device on which it trains.
    whole_block : int
        Number of clients for which a step is computed in any case, however few there are.
    """

    if TYPE_CHECKING:  # at run time, a dataclass would take the property for its field's default

        @property
        def population(self) -> int:
            """Number of clients."""

    device: torch.device = torch.device("cpu")
    whole_block: int = 1

    @abstractmethod
    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Train these clients from the global parameters ``vector [d]``, block by block."""

    @abstractmethod
    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Loss and accuracy of ``vector [d]`` on these clients' data."""

    def costs(self, client_ids: Ints) -> npt.NDArray[np.float64]:
        """Relative cost of each client's work, ``[n]``, above 0; equal by default."""
        return np.ones(len(client_ids))

    def receive(self, config: Mapping[str, object]) -> None:
        """Read the config entries of a round's instructions that are for all clients."""
        return

    def state(self, client_ids: Ints | None = None, round: int | None = None) -> ClientStates:
        """Clients' state between rounds, as of the start of ``round``.

        Without ``client_ids``, all state that must outlive the process, for a checkpoint.

        Returns
        -------
        mapping of str to Tensor ``[m, ...]``
            `CLIENT_IDS` of the ``m`` clients with state, and their state by name; empty if there
            are none.
        """
        return {}

    def store_states(self, states: ClientStates, round: int) -> None:
        """Store clients' states of the end of ``round``, as another process's `state` gave them."""
        return

    def restore(self, states: ClientStates) -> None:
        """Replace all clients' states by these, which `state` gave."""
        return

    def charge(self, client_ids: Ints, round: int, *, begins: bool = False) -> Mapping[int, str]:
        """Record, as one ledger line, what these clients will release of their examples in a round.

        Clients that were charged for the round, and have not begun it, are not charged again.

        Parameters
        ----------
        client_ids : int64 ``[n]``
        round : int
        begins : bool
            Whether they begin the round now, as a copy of this trainer; `train` does the same.

        Returns
        -------
        mapping of int to str
            Clients whose budget does not allow it, which must not train, and why.
        """
        return {}

    def copy_for(self, device: str) -> Self:
        """Trainer of the same clients for another process, on ``device``; their state is sent.

        By default it is this trainer.
        """
        return self

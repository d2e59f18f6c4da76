"""Blocks: what some clients send back, or why they did not; and what trains clients in blocks.

Blocks travel between engines and strategies; a `BlockTrainer` is all that engines ask of what
trains. With a round's parameters it is given config entries (`BlockTrainer.receive`). Where the
server keeps the mean of the clients' state, the entry `CLIENT_STATE` says so, ``client-state.NAME``
is that mean once there is one, and each client has what it ended with among its metrics by the same
name. Where clients keep their own state on the disk, the entry `KEEP_SINCE` says to the end of
which round the run may go back: what a client had then, and since, stays. In a run that protects
anything, the entry `RUN` names it: the same for all rounds of one run, also once it is resumed, and
another for every other run. By it clients know which rounds they have gone through before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.int64]

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
"""Why a client contributes nothing to a round; a row too large to be summed is no finite one."""
REASONS: tuple[Reason, ...] = get_args(Reason)


class MalformedBlockError(ValueError):
    """A block whose parts do not fit each other, or that is not what was requested."""


@dataclass(frozen=True)
class Block:
    """What ``n`` clients send back, or why they did not.

    Attributes
    ----------
    client_ids : int64 ``[n]``
        Each at most once.
    rows : Tensor ``[n, d]`` or None
        Updates ``w_client - w_global`` in the layout's order; zeros stand where a client failed,
        which has no row of its own. None for an evaluation, or where everybody failed.
    metrics : mapping of name to float64 ``[n]``
        What each client reports: ``num-examples``, ``loss``, ``accuracy`` and what else the
        algorithm gives. Those of a client that failed mean nothing.
    ok : bool ``[n]``
        False for a client that failed.
    reasons : mapping of client id to Reason
        Why each of those failed.
    usable : bool Tensor ``[n]`` or None
        Where rows were bounded and summed where clients were trained: which of them that sum now
        contains. There are no rows then.

    Raises
    ------
    MalformedBlockError
        If these do not fit each other.
    """

    client_ids: Ids
    rows: Tensor | None
    metrics: Mapping[str, npt.NDArray[np.float64]]
    ok: npt.NDArray[np.bool_]
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    usable: Tensor | None = None

    def __post_init__(self) -> None:
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
    def failed(cls, client_ids: Ids, reason: Reason) -> Block:
        """Block of clients that have all failed, for one reason."""
        reasons = dict.fromkeys(client_ids.tolist(), reason)
        return cls(client_ids, None, {}, np.zeros(len(client_ids), dtype=np.bool_), reasons)

    @classmethod
    def sent(
        cls, client_ids: Ids, rows: Tensor | None, metrics: Mapping[str, npt.NDArray[np.float64]]
    ) -> Block:
        """Block of clients none of whom failed."""
        return cls(client_ids, rows, metrics, np.ones(len(client_ids), dtype=np.bool_))

    def select(self, keep: npt.NDArray[np.bool_]) -> Block:
        """The clients for which ``keep [n]`` holds."""
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


CLIENT_STATE = "client-state"
KEEP_SINCE = "keep-since"
RUN = "run"
DECLARED_EXAMPLES = "declared-examples"
"""How many examples a client is declared to have, where its update is weighed by that."""

CLIENT_IDS = "client_ids"

ClientStates = Mapping[str, Tensor]
"""`CLIENT_IDS`, int64 ``[m]``, and by name what these keep between rounds, ``[m, ...]``."""


@runtime_checkable
class BlockTrainer(Protocol):
    """A client algorithm with its clients' data, over blocks of clients: all that engines ask.

    `train` and `evaluate` yield blocks in the order of ``client_ids``, each no larger than memory
    or cache wants, and compute nothing before they are iterated. A client's part of a block
    depends on no other client in it. Where a block raises, its clients are trained again one at a
    time: what a client keeps must change only once its block is done.

    A trainer of one's own needs `population`, `train` and `evaluate`, and inherits the rest from
    `TrainerDefaults`.
    """

    @property
    def population(self) -> int:
        """Number of clients; their ids are 0 .. population - 1."""

    @property
    def device(self) -> torch.device:
        """Where it trains."""

    def train(self, vector: Tensor, client_ids: Ids, round: int) -> Iterator[Block]:
        """Local work of these clients from the global parameters ``vector [d]``."""

    def evaluate(self, vector: Tensor, client_ids: Ids, round: int) -> Iterator[Block]:
        """Loss and accuracy of ``vector [d]`` on these clients' data."""

    def costs(self, client_ids: Ids) -> npt.NDArray[np.float64]:
        """Relative cost of each client's work, ``[n]``, above 0."""

    def receive(self, config: Mapping[str, object]) -> None:
        """Take what the config entries of a round's instructions say to all clients."""

    def state(self, client_ids: Ids | None = None, round: int | None = None) -> ClientStates:
        """What these clients keep between rounds, as of the start of ``round``.

        Without clients: all that must outlive the process, for a checkpoint.

        Returns
        -------
        mapping of str to Tensor ``[m, ...]``
            `CLIENT_IDS`, of those ``m`` that keep anything, and what they keep by name; empty if
            none does.
        """

    def keep(self, states: ClientStates, round: int) -> None:
        """Let these clients keep what `state` gave elsewhere, at the end of ``round``."""

    def restore(self, states: ClientStates) -> None:
        """Let clients keep what `state` gave, and nothing else."""

    def charge(self, vector: Tensor, client_ids: Ids, round: int) -> None:
        """Write down what these clients will release in a copy that trains them from ``vector``.

        Called before it does, each time that it does; `train` itself does the same.
        """

    def copy_for(self, device: str) -> BlockTrainer:
        """The same clients, to train on ``device`` in a process that is lent what they keep."""


class TrainerDefaults:
    """A `BlockTrainer` but for population, train and evaluate: on the CPU, keeping nothing."""

    device = torch.device("cpu")

    def costs(self, client_ids: Ids) -> npt.NDArray[np.float64]:
        """All the same."""
        return np.ones(len(client_ids))

    def receive(self, config: Mapping[str, object]) -> None:
        """Take nothing."""

    def state(self, client_ids: Ids | None = None, round: int | None = None) -> ClientStates:
        """Nothing is kept."""
        return {}

    def keep(self, states: ClientStates, round: int) -> None:
        """Nothing is kept."""

    def restore(self, states: ClientStates) -> None:
        """Nothing is kept."""

    def charge(self, vector: Tensor, client_ids: Ids, round: int) -> None:
        """Nothing is released under a client's own privacy."""

    def copy_for(self, device: str) -> Self:
        """The trainer itself, for any device."""
        return self

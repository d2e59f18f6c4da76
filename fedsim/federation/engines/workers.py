"""Workers, as the process that drives a run sees them, and what each of them runs.

An engine has a `Crew` of `Worker`: Ray's actors, or processes forked from this one. In each is a
`TrainingWorker`. Everything that travels between the two is numpy arrays and plain values: Ray and
shared memory take arrays out of band, tensors they would pickle. What comes out of shared memory
may be read-only, and is overwritten by the next answer: it is copied, but for sums, which are
merged at once.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.federation.engines.blocks import guarded_blocks
from fedsim.rows.block import Block, BlockTrainer, Ids, Reason
from fedsim.rows.exchange import BlockSum, MessageType, Summing

Arrays = dict[str, npt.NDArray[Any]]
Wire = tuple[Ids, npt.NDArray[Any] | None, Arrays, npt.NDArray[np.bool_], dict[int, Reason], Any]
"""A block's fields, its tensors as arrays."""


@dataclass(frozen=True)
class RoundCall:
    """What all of a round's clients are asked.

    Attributes
    ----------
    message_type : "train" or "evaluate"
    vector : float ``[d]``
    round : int
    config : mapping
    summing : Summing, optional
        Rows are added up here and not sent.
    """

    message_type: MessageType
    vector: npt.NDArray[Any]
    round: int
    config: Mapping[str, object]
    summing: Summing | None = None


@dataclass(frozen=True)
class WorkRequest:
    """What a worker is asked for: clients, or the sum of those since it was asked last.

    Attributes
    ----------
    wanted : "clients" or "sum"
    client_ids : int64 ``[n]``
    states : mapping of name to array
        What these clients keep between rounds, lent to this worker.
    """

    wanted: Literal["clients", "sum"]
    client_ids: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    states: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerReply:
    """What a worker says.

    Attributes
    ----------
    blocks : list of Wire
        Of clients.
    arrays : mapping of name to array
        What these clients keep afterwards; or a sum.
    error : Exception or None
        Why the round cannot be continued: no client's fault.
    """

    blocks: list[Wire] = field(default_factory=list)
    arrays: Arrays = field(default_factory=dict)
    error: Exception | None = None


class WorkerLostError(Exception):
    """A worker has ended before it answered."""


class Worker(ABC):
    """A process that trains, seen from the one that drives the run."""

    @abstractmethod
    def begin(self, call: Any) -> None:
        """Send what the round is about (`Crew.shared`); returns once the worker has started."""

    @abstractmethod
    def ask(self, work: WorkRequest) -> None:
        """Ask for something; `answer` gives what it says, in the order asked."""

    @abstractmethod
    def answer(self) -> WorkerReply:
        """The next answer, which has arrived; its arrays are good until the worker is asked again.

        Raises
        ------
        WorkerLostError
            If the worker is.
        """

    @abstractmethod
    def end(self) -> None:
        """End the process at once, whatever it does."""


WorkerT = TypeVar("WorkerT", bound=Worker)


class Crew(ABC, Generic[WorkerT]):
    """The workers of an engine.

    Attributes
    ----------
    depth : int
        Chunks that a worker may be asked for at a time: with two, one waits at the worker while
        the answer to the other travels.
    workers : list of Worker
    """

    depth: ClassVar[int]

    def __init__(self, count: int) -> None:
        self.workers: list[WorkerT] = []
        for _ in range(count):
            self.workers.append(self.new_worker())

    @abstractmethod
    def new_worker(self) -> WorkerT:
        """Start a worker."""

    def replaced(self, worker: WorkerT) -> WorkerT:
        """End a worker; another in its place."""
        index = self.workers.index(worker)
        # Taken out first: a forked worker closes the connections of the others, and not this one's.
        self.workers.pop(index).end()
        self.workers.insert(index, new := self.new_worker())
        return new

    @abstractmethod
    def begin(self) -> None:
        """Drop the answers to requests of an earlier round that was not finished."""

    @abstractmethod
    def first_done(self, busy: Sequence[WorkerT], seconds: float | None) -> WorkerT | None:
        """One of these that has answered or was lost; None if none has in that time."""

    @abstractmethod
    def shared(self, call: RoundCall) -> Any:
        """A round's call, where every worker can read it: what is sent to each."""

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.end()
        self.workers = []


class TrainingWorker:
    """A trainer on a device, in a process of its own."""

    def __init__(self, trainer: BlockTrainer, device: str) -> None:
        self._trainer, self._device = trainer.copy_for(device), torch.device(device)
        self._sum: BlockSum | None = None

    def begin(self, call: RoundCall) -> None:
        """A round begins, and nothing of an earlier one counts any more."""
        self._call, self._sum = call, None
        self._vector: Tensor = torch.from_numpy(np.array(call.vector)).to(self._device)
        if call.message_type == "train":
            self._trainer.receive(call.config)

    def work(self, work: WorkRequest) -> WorkerReply:
        """Blocks of clients, or their sum."""
        try:
            return self._clients(work) if work.wanted == "clients" else self._collected()
        except Exception as error:
            # Some errors cannot be sent as they are.
            sendable = error if isinstance(error, FedsimError) else FedsimError(repr(error))
            return WorkerReply(error=sendable)

    def _clients(self, work: WorkRequest) -> WorkerReply:
        call, ids = self._call, np.array(work.client_ids)
        # The driver keeps what clients keep: whichever worker has them next is lent it.
        self._trainer.restore(to_tensors(work.states))
        if call.summing is not None and self._sum is None:
            self._sum = call.summing.start(self._device)
        wires = []
        for block in guarded_blocks(
            self._trainer, call.message_type, self._vector, ids, call.round
        ):
            wires.append(to_wire(block if self._sum is None else self._sum.add(block)))
        keeps = self._trainer.state(ids) if call.message_type == "train" else {}
        return WorkerReply(wires, to_arrays(keeps))

    def _collected(self) -> WorkerReply:
        summed, self._sum = self._sum, None
        return WorkerReply(arrays={} if summed is None else to_arrays(summed.state()))


def to_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Tensors by name, as numpy arrays."""
    return {name: values.cpu().numpy() for name, values in tensors.items()}


def to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays by name, copied into tensors of this process."""
    return {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}


def to_views(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays by name as tensors without a copy: not to be written to, and not to be kept."""
    with warnings.catch_warnings():
        # It warns that the memory is not writable, which is meant.
        warnings.simplefilter("ignore", UserWarning)
        return {name: torch.from_numpy(np.asarray(values)) for name, values in arrays.items()}


def to_wire(block: Block) -> Wire:
    """A block as an answer takes it."""
    rows = None if block.rows is None else block.rows.detach().cpu().numpy()
    usable = None if block.usable is None else block.usable.cpu().numpy()
    return block.client_ids, rows, dict(block.metrics), block.ok, dict(block.reasons), usable


def from_wire(wire: Wire) -> Block:
    """The block that `to_wire` was given, copied into memory of this process."""
    client_ids, rows, metrics, ok, reasons, usable = wire
    return Block(
        client_ids=np.array(client_ids),
        rows=None if rows is None else torch.from_numpy(np.array(rows)),
        metrics={name: np.array(values) for name, values in metrics.items()},
        ok=np.array(ok),
        reasons=reasons,
        usable=None if usable is None else torch.from_numpy(np.array(usable)),
    )

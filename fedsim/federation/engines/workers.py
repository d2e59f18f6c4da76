"""Workers, as the process that drives a run sees them, and what each of them runs.

An engine has a `Crew` of `Worker`: Ray's actors, or processes forked from this one. In each is a
`TrainingWorker`. What travels between the two is pickled here (`pack`), large tensors and arrays
apart, so that shared memory and Ray's object store take each of them once. What comes out of there
may be read-only, and is overwritten by the next answer: it is copied, but for sums, which are
merged at once.
"""

from __future__ import annotations

import io
import logging
import pickle
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.errors import BudgetSpentError, FedsimError, described
from fedsim.federation.exchange import Instructions, MessageType
from fedsim.federation.row_sums import RowSum, Summing
from fedsim.mechanisms import Releaser
from fedsim.rows.block import (
    Block,
    BlockTrainer,
    ClientStates,
    Ids,
    MalformedBlockError,
    Reason,
)

_log = logging.getLogger(__name__)

# Smaller arrays are copied: they are not worth a buffer of their own, and what an algorithm keeps
# and changes in place (rates, counters) is among them.
_APART_FROM = 1 << 20


@dataclass(frozen=True)
class RoundCall:
    """What all of a round's clients are asked.

    Attributes
    ----------
    message_type : "train" or "evaluate"
    vector : Tensor ``[d]``
    round : int
    config : mapping
    summing : Summing, optional
        Rows are added up here and not sent.
    row_size : int, optional
        As of `Instructions`.
    """

    message_type: MessageType
    vector: Tensor
    round: int
    config: Mapping[str, object] = field(default_factory=dict)
    summing: Summing | None = None
    row_size: int | None = None

    @classmethod
    def of(cls, instructions: Instructions, summing: Summing | None = None) -> RoundCall:
        """What trainers need of a round's instructions."""
        return cls(
            instructions.message_type,
            instructions.vector,
            instructions.round,
            dict(instructions.config),
            summing,
            instructions.row_size,
        )


@dataclass(frozen=True)
class WorkRequest:
    """What a worker is asked for: clients, or the sum of those since it was asked last.

    Attributes
    ----------
    client_ids : int64 ``[n]`` or None
        None for the sum.
    states : mapping of name to Tensor
        What these clients keep between rounds, lent to this worker.
    """

    client_ids: Ids | None
    states: ClientStates = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerReply:
    """What a worker says.

    Attributes
    ----------
    blocks : list of Block
        Of clients, on the CPU.
    tensors : mapping of name to Tensor
        What these clients keep afterwards; or a sum.
    error : Exception or None
        Why the round cannot be continued: no client's fault.
    """

    blocks: list[Block] = field(default_factory=list)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
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
    def answer(self, *, copied: bool) -> WorkerReply:
        """The next answer, which has arrived.

        Unless they are ``copied``, its arrays are good until the worker is asked again, and not to
        be written to.

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
        self._sum: RowSum | None = None

    def begin(self, call: RoundCall) -> None:
        """A round begins, and nothing of an earlier one counts any more."""
        self._call, self._sum = replace(call, vector=call.vector.to(self._device)), None
        if call.message_type == "train":
            self._trainer.receive(call.config)

    def work(self, work: WorkRequest) -> WorkerReply:
        """Blocks of clients, or their sum."""
        try:
            if work.client_ids is not None:
                return self._trained(work.client_ids, work.states)
            summed, self._sum = self._sum, None
            return WorkerReply(tensors={} if summed is None else summed.total.state())
        except Exception as error:
            return WorkerReply(error=sendable(error))

    def _trained(self, client_ids: Ids, states: ClientStates) -> WorkerReply:
        call = self._call
        # The driver keeps what clients keep: whichever worker has them next is lent it.
        self._trainer.restore(states)
        if call.summing is not None and self._sum is None:
            plan, layout = call.summing.plan, call.summing.layout
            self._sum = RowSum(call.summing, Releaser(plan, layout, device=self._device))
        blocks = guarded_blocks(self._trainer, call, client_ids)
        sent = [block if self._sum is None else self._sum.add(block) for block in blocks]
        keeps = self._trainer.state(client_ids) if call.message_type == "train" else {}
        return WorkerReply(sent, keeps)


def sendable(error: Exception) -> FedsimError:
    """An error that can be pickled: some cannot as they are."""
    return error if isinstance(error, FedsimError) else FedsimError(repr(error))


def guarded_blocks(trainer: BlockTrainer, call: RoundCall, client_ids: Ids) -> Iterator[Block]:
    """Blocks of a trainer, in which the clients that raise have failed and no others.

    When a block raises, or is not what was asked for, its clients are run one at a time until
    the one at fault is found, and then in blocks again. Clients do not depend on their neighbours,
    so those that succeed give the same bytes as they would have in the block.

    Yields
    ------
    Block
        In the order of ``client_ids``.
    """
    work = trainer.train if call.message_type == "train" else trainer.evaluate
    position = 0
    alone = False
    failures: dict[str, list[int]] = {}
    while position < len(client_ids):
        rest = client_ids[position : position + 1] if alone else client_ids[position:]
        end = position + len(rest)
        reason: Reason = "missing"
        detail = "there was no block of it"
        try:
            for block in work(call.vector, rest, call.round):
                _require_asked(block, call, client_ids[position:end])
                yield block
                position += len(block.client_ids)
        # A client's code may raise anything, and `sys.exit` is one way to.
        except (Exception, SystemExit) as error:
            reason = _reason_of(error)
            detail = described(error)
            _log.debug("clients %s in round %d", rest, call.round, exc_info=True)
        if position == end:
            continue
        if not alone:
            alone = True
            continue
        failures.setdefault(detail, []).append(int(client_ids[position]))
        yield Block.failed(client_ids[position:end], reason)
        position += 1
        alone = False
    for detail, failed in failures.items():  # a fault in shared code is every client's
        first, others = ", ".join(map(str, failed[:5])), len(failed) - 5
        clients = f"clients {first}" if len(failed) > 1 else f"client {first}"
        more = f" and {others} more" if others > 0 else ""
        _log.warning("%s%s failed in round %d: %s", clients, more, call.round, detail)


def _reason_of(error: BaseException) -> Reason:
    if isinstance(error, BudgetSpentError):
        return "budget"
    return "malformed" if isinstance(error, MalformedBlockError) else "raised"


def _require_asked(block: Block, call: RoundCall, rest: Ids) -> None:
    """Raise `MalformedBlockError` unless a block is of the clients and parameters asked for."""
    ids = block.client_ids
    row_size = len(call.vector) if call.row_size is None else call.row_size
    if not len(ids) or not np.array_equal(ids, rest[: len(ids)]):
        raise MalformedBlockError(f"a block is of clients {ids}; asked next were {rest}.")
    if call.message_type == "evaluate":
        if block.rows is not None:
            raise MalformedBlockError("a block of an evaluation has rows; it must have none.")
    elif block.rows is None:
        if block.ok.any():
            raise MalformedBlockError("a block of trained clients has no rows.")
    elif block.rows.shape[1] != row_size:
        raise MalformedBlockError(
            f"rows of a block have {block.rows.shape[1]} entries; they must have {row_size}."
        )


Piece = bytes | memoryview


def pack(value: object, *, by_value: bool = False) -> list[Piece]:
    """A value as a pickle, and after it its large arrays and tensors, which are on no GPU then.

    Parameters
    ----------
    by_value : bool
        Classes and functions that another process cannot import go along. So does in any case a
        class that no name leads to.
    """
    stream, buffers = io.BytesIO(), list[memoryview]()

    def stays(buffer: pickle.PickleBuffer) -> bool:
        if (raw := buffer.raw()).nbytes < _APART_FROM:
            return True
        buffers.append(raw)
        return False

    try:
        _pickler(by_value)(stream, protocol=5, buffer_callback=stays).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        if by_value:
            raise
        return pack(value, by_value=True)
    return [stream.getbuffer(), *buffers]


def unpack(pieces: Iterable[Any], *, copied: bool) -> Any:
    """What `pack` was given, over the memory of these pieces, or in memory of its own."""
    body, *arrays = pieces
    return pickle.loads(body, buffers=map(bytearray, arrays) if copied else arrays)


@cache
def _pickler(by_value: bool) -> Any:
    base: Any = pickle.Pickler
    if by_value:
        from ray import cloudpickle

        base = cloudpickle.CloudPickler

    class Pickler(base):  # type: ignore[misc]
        """Writes tensors as arrays, which pickles take out of band."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, nn.Parameter):
                return _parameter, (value.detach().cpu().numpy(), value.requires_grad)
            if type(value) is Tensor and not value.requires_grad:
                with suppress(TypeError, NotImplementedError):  # of which numpy has no array
                    return _tensor, (np.asarray(value.cpu().numpy(), order="C"),)
            return super().reducer_override(value) if by_value else NotImplemented

    return Pickler


def _tensor(values: npt.NDArray[Any]) -> Tensor:
    if values.flags.writeable:
        return torch.from_numpy(values)
    with warnings.catch_warnings():
        # It warns that the memory is not writable, which is meant.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(values)


def _parameter(values: npt.NDArray[Any], requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(values.copy()), requires_grad=requires_grad)

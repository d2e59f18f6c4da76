"""Workers: their interface for the process that drives a run, and the code that each of them runs.

An engine has a `WorkerPool` of `Worker` objects: Ray actors, or processes forked from this one.
Each runs a `TrainingWorker`. Messages between the two are pickled here (`pack`) with large tensors
and arrays out of band, so that shared memory and Ray's object store hold each of them once. Memory
read from there may be read-only, and is overwritten by the next answer: the driver copies it,
except for sums, which it merges at once.
"""

from __future__ import annotations

import io
import logging
import pickle
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.array_types import Ints
from fedsim.errors import BudgetSpentError, FedsimError, described
from fedsim.federation.exchange import Instructions
from fedsim.mechanisms import PartialSum, Releaser
from fedsim.rows.block import Block, BlockTrainer, ClientStates, MalformedBlockError, Reason

_log = logging.getLogger(__name__)

# Smaller arrays stay in the pickle, which copies them: a separate buffer does not pay off, and an
# algorithm changes some of them (rates, counters) in place.
_OUT_OF_BAND_BYTES = 1 << 20


@dataclass(frozen=True)
class WorkRequest:
    """Request to a worker: train or evaluate clients, or send their sum and start a new one.

    Attributes
    ----------
    client_ids : int64 ``[n]`` or None
        Clients to run; None to request the sum.
    states : mapping of name to Tensor
        States of these clients from earlier rounds.
    """

    client_ids: Ints | None
    states: ClientStates = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerReply:
    """Answer of a worker.

    Attributes
    ----------
    blocks : list of Block
        Blocks of the requested clients, on the CPU.
    tensors : mapping of name to Tensor
        States of these clients after the round; or the requested sum.
    error : Exception or None
        Error that ends the round, and that no client has caused.
    """

    blocks: list[Block] = field(default_factory=list)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None


class WorkerLostError(Exception):
    """The worker ended before it answered."""


class Worker(ABC):
    """A process that trains, as the process that drives the run uses it."""

    @abstractmethod
    def begin(self, reference: Any) -> None:
        """Send the reference of `WorkerPool.shared`; returns once the worker has started."""

    @abstractmethod
    def ask(self, work: WorkRequest) -> None:
        """Send a request; `answer` returns the answers in the order of the requests."""

    @abstractmethod
    def answer(self, *, copied: bool) -> WorkerReply:
        """The next answer, which must have arrived (`WorkerPool.first_done`).

        Unless ``copied``, its arrays are valid until the worker is asked again, and must not be
        written to.

        Raises
        ------
        WorkerLostError
            If the worker has ended.
        """

    @abstractmethod
    def end(self) -> None:
        """End the process at once, whatever it is doing."""


WorkerT = TypeVar("WorkerT", bound=Worker)


class WorkerPool(ABC, Generic[WorkerT]):
    """The workers of an engine.

    Attributes
    ----------
    depth : int
        Number of chunks that a worker may have in its queue: with two, it begins the second while
        its answer to the first is transferred.
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

    def replace_worker(self, worker: WorkerT) -> WorkerT:
        """End a worker, and return a new one in its place."""
        index = self.workers.index(worker)
        # Removed first: a newly forked worker closes the connections of all workers in the list,
        # and this one's is closed already.
        self.workers.pop(index).end()
        self.workers.insert(index, replacement := self.new_worker())
        return replacement

    @abstractmethod
    def begin(self) -> None:
        """Drop the answers to requests of an earlier round that was not finished."""

    @abstractmethod
    def first_done(self, busy: Sequence[WorkerT], seconds: float | None) -> WorkerT | None:
        """One of these that has answered or was lost; None if there is none after ``seconds``."""

    @abstractmethod
    def shared(self, instructions: Instructions) -> Any:
        """Store a round's instructions where all workers can read them; return the reference."""

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.end()
        self.workers = []


class TrainingWorker:
    """A trainer on a device, in a worker's process."""

    def __init__(self, trainer: BlockTrainer, device: str) -> None:
        self._trainer, self._device = trainer.copy_for(device), torch.device(device)
        self._sum: PartialSum | None = None

    @property
    def device_name(self) -> str:
        """The device, or the model of the GPU."""
        if self._device.type == "cuda":
            return torch.cuda.get_device_name(self._device)
        return self._device.type

    def begin(self, instructions: Instructions) -> None:
        """Begin a round, and discard the sum of an earlier one."""
        vector = instructions.vector.to(self._device)
        self._instructions, self._sum = replace(instructions, vector=vector), None
        if instructions.message_type == "train":
            self._trainer.receive(instructions.config)

    def work(self, work: WorkRequest) -> WorkerReply:
        """Run the requested clients, or return their sum."""
        try:
            if work.client_ids is not None:
                return self._trained(work.client_ids, work.states)
            summed, self._sum = self._sum, None
            return WorkerReply(tensors={} if summed is None else summed.state())
        except Exception as error:
            return WorkerReply(error=picklable_error(error))

    def _trained(self, client_ids: Ints, states: ClientStates) -> WorkerReply:
        instructions, summing = self._instructions, self._instructions.summing
        # Clients' states are stored by the driver and sent with each request, since another worker
        # may have run these clients last.
        self._trainer.restore(states)
        blocks = guarded_blocks(self._trainer, instructions, client_ids)
        if summing is None:
            trained = list(blocks)
        else:
            if self._sum is None:
                releaser = Releaser(summing.plan, summing.layout, device=self._device)
                self._sum = summing.start(releaser)
            trained = [summing.add(block, self._sum) for block in blocks]
        new_states = self._trainer.state(client_ids) if instructions.message_type == "train" else {}
        return WorkerReply(trained, new_states)


def picklable_error(error: Exception) -> FedsimError:
    """The error in a form that can be pickled, as some exceptions cannot."""
    return error if isinstance(error, FedsimError) else FedsimError(repr(error))


def guarded_blocks(
    trainer: BlockTrainer, instructions: Instructions, client_ids: Ints
) -> Iterator[Block]:
    """Run clients in blocks, so that a client that raises fails alone.

    If a block raises or is malformed, the clients without a block are run again in two halves, and
    so on, until the faulty client is alone. A client's result does not depend on the others in its
    block, so that the successful clients have the same bytes as without the faulty one.

    Yields
    ------
    Block
        In the trainer's order.
    """
    work = trainer.train if instructions.message_type == "train" else trainer.evaluate
    todo = [client_ids]
    failures: dict[str, list[int]] = {}
    while todo:
        ids = todo.pop()
        missing = dict.fromkeys(ids.tolist())
        reason: Reason = "missing"
        detail = "there was no block of it"
        try:
            for block in work(instructions.vector, ids, instructions.round) if missing else ():
                _require_requested(block, instructions, missing.keys())
                yield block
                for client in block.client_ids.tolist():
                    del missing[client]
        # A client's code may raise any exception, or call `sys.exit`.
        except (Exception, SystemExit) as error:
            reason = _reason_of(error)
            detail = described(error)
            _log.debug("clients %s in round %d", ids, instructions.round, exc_info=True)
        if len(missing) > 1:
            todo += reversed(np.array_split(np.array([*missing]), 2))
        elif missing:
            failures.setdefault(detail, []).extend(missing)
            yield Block.failed(np.array([*missing]), reason)
    for detail, failed in failures.items():  # one line a cause: shared code fails for all clients
        first, hidden = ", ".join(map(str, sorted(failed)[:5])), len(failed) - 5
        clients = f"clients {first}" if len(failed) > 1 else f"client {first}"
        suffix = f" and {hidden} more" if hidden > 0 else ""
        number = instructions.round
        _log.warning("%s%s failed in round %d: %s", clients, suffix, number, detail)


def _reason_of(error: BaseException) -> Reason:
    if isinstance(error, BudgetSpentError):
        return "budget"
    return "malformed" if isinstance(error, MalformedBlockError) else "raised"


def _require_requested(block: Block, instructions: Instructions, missing: Set[int]) -> None:
    """Raise `MalformedBlockError` unless a block has only missing clients, and their rows."""
    ids, layout = block.client_ids.tolist(), instructions.layout
    if not ids or not missing >= set(ids):
        raise MalformedBlockError(
            f"a block is of clients {ids}; it must be of some of the clients that are still "
            f"missing, {np.array([*missing])}."
        )
    if layout is None:
        if block.rows is not None:
            raise MalformedBlockError("a block of an evaluation has rows; it must have none.")
    elif block.rows is None:
        if block.ok.any():
            raise MalformedBlockError("a block of trained clients has no rows.")
    elif block.rows.shape[1] != layout.d:
        raise MalformedBlockError(
            f"rows of a block have {block.rows.shape[1]} entries; they must have {layout.d}."
        )


Piece = bytes | memoryview


def pack(value: object, *, by_value: bool = False) -> list[Piece]:
    """Pickle a value; its large arrays and tensors follow as separate buffers, on the CPU.

    Parameters
    ----------
    by_value : bool
        Also pickle the code of classes and functions that another process cannot import. This is
        the fallback if plain pickling fails, for example for a class defined in a function.
    """
    stream, buffers = io.BytesIO(), list[memoryview]()

    def stays(buffer: pickle.PickleBuffer) -> bool:
        if (raw := buffer.raw()).nbytes < _OUT_OF_BAND_BYTES:
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
    """Inverse of `pack`; the result refers to the memory of the pieces unless ``copied``."""
    body, *arrays = pieces
    return pickle.loads(body, buffers=map(bytearray, arrays) if copied else arrays)


@cache
def _pickler(by_value: bool) -> Any:
    base: Any = pickle.Pickler
    if by_value:
        from ray import cloudpickle

        base = cloudpickle.CloudPickler

    class Pickler(base):  # type: ignore[misc]
        """Pickles tensors as arrays, which pickle can store out of band."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, nn.Parameter):
                return _parameter, (value.detach().cpu().numpy(), value.requires_grad)
            if type(value) is Tensor and not value.requires_grad:
                with suppress(TypeError, NotImplementedError):  # dtypes that numpy lacks
                    return _tensor, (np.asarray(value.cpu().numpy(), order="C"),)
            return super().reducer_override(value) if by_value else NotImplemented

    return Pickler


def _tensor(values: npt.NDArray[Any]) -> Tensor:
    if values.flags.writeable:
        return torch.from_numpy(values)
    with warnings.catch_warnings():
        # torch warns that the memory is not writable, which is intended here.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(values)


def _parameter(values: npt.NDArray[Any], requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(values.copy()), requires_grad=requires_grad)

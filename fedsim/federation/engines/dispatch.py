"""Scheduling of one round over workers: which worker trains which clients, retries and timeouts.

Workers are Ray actors or processes of this machine (`WorkerPool`). They answer requests in the
order in which they are asked, or are lost. Where a strategy takes sums, a worker adds up the rows
that it trains and sends one sum at the end: until that has arrived its clients are not done, and if
the worker is lost they are trained again, with the same bytes as result.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.array_types import Ints
from fedsim.errors import FedsimError
from fedsim.federation.engines.workers import (
    Worker,
    WorkerLostError,
    WorkerPool,
    WorkerReply,
    WorkRequest,
)
from fedsim.federation.exchange import Instructions
from fedsim.mechanisms import PartialSum
from fedsim.rows.block import Block, BlockTrainer, ClientStates, Reason

_log = logging.getLogger(__name__)

CHUNK_FRACTION = 0.75
"""Cost of a chunk, as a fraction of the remaining cost per worker."""
MAX_CHUNKS_PER_WORKER = 12
"""A chunk costs at least the round's cost per worker divided by this number."""
RETRIES = 2
"""How many times a chunk may lose its worker before its clients are tried one by one."""
# Largest reply with rows, unless a single client's row is larger.
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class _Chunk:
    """Clients that a worker trains in one request.

    Attributes
    ----------
    client_ids
    losses : int
        How often their worker was lost.
    alone : bool
        Whether the worker gets no other request at the same time.
    """

    client_ids: Ints
    losses: int = 0
    alone: bool = False

    def singles(self, *, alone: bool = False) -> list[_Chunk]:
        """One chunk for each of these clients."""
        ids = self.client_ids
        return [_Chunk(ids[k : k + 1], self.losses, alone) for k in range(len(ids))]


@dataclass(eq=False)
class _Assignment:
    """State of a worker in this round.

    Attributes
    ----------
    worker
    queue : deque of _Chunk
        Chunks that it was asked for and has not answered.
    done : list of (_Chunk, WorkerReply)
        Chunks that it has answered, whose rows are still in its sum.
    summing : bool
        Whether it was asked for that sum.
    start_time : float
        When it began with the first chunk of its queue, by `time.monotonic`.
    has_instructions : bool
        Whether it was sent the round's instructions.
    """

    worker: Worker
    queue: deque[_Chunk] = field(default_factory=deque)
    done: list[tuple[_Chunk, WorkerReply]] = field(default_factory=list)
    summing: bool = False
    start_time: float = 0.0
    has_instructions: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.queue) or self.summing

    def takes(self, chunk: _Chunk, depth: int) -> bool:
        """Whether the worker may be asked for a chunk now, with at most ``depth`` in its queue."""
        if self.summing or len(self.queue) >= depth:
            return False
        if chunk.alone:
            return not self.queue and not self.done
        return not self.queue or not self.queue[0].alone


class Dispatch:
    """Trains one round's clients on the workers of a pool, and yields their blocks.

    Chunks of clients go to the workers that are free, most expensive first. A worker that is lost
    is replaced and its clients are trained again; clients that keep losing their worker fail. So
    does a client that alone takes a worker longer than the round's timeout.

    Invariant: each client is yielded once, and only when its result can no longer be lost. Where
    workers sum, that is when the sum with its row was merged; until then its chunk is in its
    worker's ``done``, and returns to the queue if the worker is lost.

    Parameters
    ----------
    pool : WorkerPool
    trainer : BlockTrainer
        Stores the clients' states, and their ledger.
    instructions : Instructions
    timeout : float or None
    retries : int
        How many times a chunk may lose its worker before its clients are tried one by one, each
        on a worker that does nothing else meanwhile.
    into : PartialSum, optional
        The sum into which workers' sums are merged; without it blocks keep their rows.
    """

    def __init__(
        self,
        pool: WorkerPool[Any],
        trainer: BlockTrainer,
        instructions: Instructions,
        timeout: float | None,
        *,
        retries: int,
        into: PartialSum | None = None,
    ) -> None:
        self._pool, self._trainer, self._into = pool, trainer, into
        self._timeout, self._retries = timeout, retries
        self._instructions = instructions.for_workers(sum_rows=into is not None)
        vector = self._instructions.vector
        ids = np.asarray(instructions.recipients.client_ids, dtype=np.int64)
        row_bytes = max(vector.numel() * vector.element_size(), 1)
        # Summed rows are not sent, so that their chunks may have any size.
        largest = len(ids) if into is not None else max(1, _CHUNK_BYTES // row_bytes)
        # Charged once, however often a worker is lost: what it has trained has not left it.
        self._refused: Mapping[int, str] = {}
        if instructions.message_type == "train":
            self._refused = trainer.charge(ids, instructions.round, begins=True)
            ids = ids[[client not in self._refused for client in ids.tolist()]]
        chunk_ids = chunks(
            ids,
            trainer.costs(ids),
            workers=len(pool.workers),
            largest=largest,
            smallest=trainer.whole_block,
        )
        self._todo = deque(map(_Chunk, chunk_ids))

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of all clients, in no particular order."""
        for client, reason in self._refused.items():
            _log.warning("client %s does not train: %s", client, reason)
            yield Block.failed(np.array([client]), "budget")
        # Drop answers of an earlier round that was not read to its end.
        self._pool.begin()
        reference = self._pool.shared(self._instructions)
        self._assignments = [_Assignment(worker) for worker in self._pool.workers]
        while True:
            for client_ids, reason in self._hand_out(reference):
                yield Block.failed(client_ids, reason)
            busy = [assignment for assignment in self._assignments if assignment.busy]
            if not busy:
                return
            assignment = self._first_done(busy)
            if assignment is None:
                yield from self._after_timeout()
                continue
            try:
                answer = assignment.worker.answer(copied=not assignment.summing)
            except WorkerLostError as error:
                yield from self._after_loss(assignment, error)
                continue
            yield from self._received(assignment, answer)

    def _hand_out(self, reference: Any) -> list[tuple[Ints, Reason]]:
        """Assign chunks to workers; return the clients that cannot begin, and why."""
        refusals: list[tuple[Ints, Reason]] = []
        # Every worker gets a first chunk before any gets a second: at the end of a round, two
        # chunks on one worker would leave another idle.
        for depth in range(1, self._pool.depth + 1):
            for assignment in self._assignments:
                while self._todo and assignment.takes(self._todo[0], depth):
                    chunk = self._todo.popleft()
                    try:
                        states = self._entry_states(chunk)
                    except FedsimError as error:
                        # Try each alone, so that the others train.
                        if len(chunk.client_ids) > 1:
                            self._todo.extendleft(chunk.singles())
                            continue
                        _log.warning("client %s does not train: %s", chunk.client_ids[0], error)
                        refusals.append((chunk.client_ids, "raised"))
                    else:
                        self._ask(assignment, chunk, states, reference)
        for assignment in self._assignments:
            # Fetch the worker's sum at the end, and before it gets a client alone: such a client is
            # suspected of ending its worker, which would lose the others' rows.
            if assignment.done and not assignment.busy and (not self._todo or self._todo[0].alone):
                assignment.worker.ask(WorkRequest(None))
                assignment.summing = True
        return refusals

    def _ask(
        self, assignment: _Assignment, chunk: _Chunk, states: ClientStates, reference: Any
    ) -> None:
        if not assignment.has_instructions:
            # Sent here and not when the round begins, so that a replacement worker gets it too.
            assignment.worker.begin(reference)
            assignment.has_instructions = True
        if not assignment.queue:
            assignment.start_time = time.monotonic()
        assignment.worker.ask(WorkRequest(chunk.client_ids, states))
        assignment.queue.append(chunk)

    def _entry_states(self, chunk: _Chunk) -> ClientStates:
        """The states of these clients, which are stored here.

        Raises
        ------
        FedsimError
            If a client's state cannot be read.
        """
        ids, number = chunk.client_ids, self._instructions.round
        if self._instructions.message_type == "evaluate":
            return self._trainer.state(ids, None)
        return self._trainer.state(ids, number)

    def _first_done(self, busy: list[_Assignment]) -> _Assignment | None:
        """The first worker with an answer; None once one has exceeded the timeout on a chunk."""
        patience = None
        working = [assignment.start_time for assignment in busy if assignment.queue]
        if self._timeout is not None and working:
            patience = max(0.0, min(working) + self._timeout - time.monotonic())
        worker = self._pool.first_done([assignment.worker for assignment in busy], patience)
        return next((assignment for assignment in busy if assignment.worker is worker), None)

    def _received(self, assignment: _Assignment, answer: WorkerReply) -> Iterator[Block]:
        if answer.error is not None:
            # An error of the sum or the trainer, not of a client: all workers would fail with it.
            raise answer.error
        if assignment.queue:
            assignment.done.append((assignment.queue.popleft(), answer))
            assignment.start_time = time.monotonic()
            if self._into is not None:
                # The rows are still in the worker's memory only.
                return
        else:
            assert self._into is not None
            self._into.merge(answer.tensors)
        # The rows of these clients are here, and cannot be lost any more.
        answered, assignment.done, assignment.summing = assignment.done, [], False
        for _, trained in answered:
            if trained.tensors:
                self._trainer.store_states(trained.tensors, self._instructions.round)
            yield from trained.blocks

    def _after_loss(self, assignment: _Assignment, error: Exception) -> Iterator[Block]:
        """Replace a worker that was lost, and queue its clients again.

        Answers on their way are lost with it, so that any client in its queue may have caused the
        loss. Only a client that had the worker alone surely did, and fails.
        """
        blamed = list(assignment.queue) or [chunk for chunk, _ in assignment.done]
        lost_ids = np.concatenate([chunk.client_ids for chunk in blamed])
        _log.warning("a worker was lost with clients %s: %s", lost_ids, error)
        # Finished chunks are lost with the worker's sum, but did not cause the loss, unless its
        # queue was empty.
        innocent = [chunk for chunk, _ in assignment.done] if assignment.queue else []
        self._replace(assignment)
        self._todo.extendleft(innocent)
        for suspect in blamed:
            retry = replace(suspect, losses=suspect.losses + 1)
            if suspect.alone:
                yield Block.failed(suspect.client_ids, "missing")
            elif retry.losses < self._retries:
                self._todo.appendleft(retry)
            else:
                self._todo.extend(retry.singles(alone=True))

    def _after_timeout(self) -> Iterator[Block]:
        """Replace the workers that have exceeded the timeout on a chunk.

        It is unknown which of the chunk's clients is slow: each is tried alone, with the full
        timeout, so that one that hangs takes no time from the others.
        """
        late = time.monotonic() - (self._timeout or 0.0)
        for assignment in self._assignments:
            if not assignment.queue or assignment.start_time > late:
                continue
            chunk = assignment.queue.popleft()
            _log.warning("clients %s have not finished in %s s", chunk.client_ids, self._timeout)
            self._todo.extendleft([chunk for chunk, _ in assignment.done])
            self._todo.extendleft(reversed(assignment.queue))
            self._replace(assignment)
            if len(chunk.client_ids) > 1:
                self._todo.extend(chunk.singles())
            else:
                yield Block.failed(chunk.client_ids, "timeout")

    def _replace(self, assignment: _Assignment) -> None:
        index = self._assignments.index(assignment)
        self._assignments[index] = _Assignment(self._pool.replace_worker(assignment.worker))


def chunks(
    client_ids: Ints,
    costs: npt.NDArray[np.float64],
    *,
    workers: int,
    largest: int,
    smallest: int = 1,
) -> list[Ints]:
    """Cut clients into chunks in decreasing order of cost, of at most ``largest`` clients each.

    They have at least ``smallest``, but for the last one: a GPU computes a whole block in any case.

    The first chunks are few and large, the last ones small. Assigned in order to free workers, they
    keep all workers busy to the end, also if one is only three quarters as fast as the others.
    Clients with equal numbers of steps are adjacent, which suits blocks. The results do not depend
    on which worker trains a client.

    Parameters
    ----------
    client_ids, costs : ``[n]``
    workers : int
    """
    order = np.argsort(-costs, kind="stable")
    cumulative = np.concatenate([[0.0], np.cumsum(costs[order])])
    min_cost = cumulative[-1] / (MAX_CHUNKS_PER_WORKER * workers)
    parts: list[Ints] = []
    start = 0
    while start < len(order):
        target = max(CHUNK_FRACTION * (cumulative[-1] - cumulative[start]) / workers, min_cost)
        # Include the client whose cost reaches the target.
        stop = int(np.searchsorted(cumulative, cumulative[start] + target))
        stop = min(max(stop, start + max(1, smallest)), start + largest, len(order))
        parts.append(client_ids[order[start:stop]])
        start = stop
    return parts

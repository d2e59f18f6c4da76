"""One round over workers: who is asked for which clients, and what becomes of their replies.

Workers are Ray's or processes of this machine (`Crew`); a round knows only that they answer in
the order in which they are asked, or are lost. Where a strategy takes sums, a worker adds up what
it trains and gives one sum at the end: until that is here its clients are not done, and if it is
lost they are trained again, to the same bytes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.federation.engines.workers import (
    Crew,
    RoundCall,
    Worker,
    WorkerLostError,
    WorkerReply,
    WorkRequest,
)
from fedsim.federation.exchange import Instructions
from fedsim.federation.row_sums import RowSum
from fedsim.rows.block import Block, BlockTrainer, ClientStates, Ids, Reason

_log = logging.getLogger(__name__)

SHARE = 0.75
"""A chunk is this part of what would be a worker's share of the clients that are left."""
LEAST_SHARE = 12
"""No chunk is planned smaller than this part of what a worker has to do."""
RETRIES = 2
"""How many times clients may lose their worker before they are tried one by one."""
# No reply with rows is larger than this, if a single client's is not.
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class _Chunk:
    """Clients that a worker is asked for at once.

    Attributes
    ----------
    client_ids
    losses : int
        How often they lost theirs.
    alone : bool
        Whether a worker is asked for nothing else meanwhile.
    """

    client_ids: Ids
    losses: int = 0
    alone: bool = False

    def singles(self, *, alone: bool = False) -> list[_Chunk]:
        """Each of these clients as a chunk."""
        ids = self.client_ids
        return [_Chunk(ids[k : k + 1], self.losses, alone) for k in range(len(ids))]


@dataclass(eq=False)
class _Assignment:
    """A worker in this round.

    Attributes
    ----------
    worker
    queue : deque of _Chunk
        What it was asked for and has not answered.
    done : list of (_Chunk, WorkerReply)
        What it has answered, and keeps in its sum.
    summing : bool
        Whether it was asked for that sum.
    since : float
        When it began with the first of its queue, by `time.monotonic`.
    begun : bool
        Whether it knows of the round.
    """

    worker: Worker
    queue: deque[_Chunk] = field(default_factory=deque)
    done: list[tuple[_Chunk, WorkerReply]] = field(default_factory=list)
    summing: bool = False
    since: float = 0.0
    begun: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.queue) or self.summing

    def takes(self, chunk: _Chunk, depth: int) -> bool:
        """Whether it may be asked for a chunk beside what it was asked for."""
        if self.summing or len(self.queue) >= depth:
            return False
        if chunk.alone:
            return not self.queue and not self.done
        return not self.queue or not self.queue[0].alone


class Dispatch:
    """The blocks of one round's clients, from whichever workers train them.

    Chunks of clients go to the workers that are free, longest first. A worker that is lost is
    replaced and its clients are trained again; clients that keep losing their worker have failed.
    So has a client that alone takes a worker longer than the round's timeout.

    What must stay true: a client is yielded once, and only when nothing can undo it. Where workers
    sum, that is when the sum that has its row is merged; until then it stands in `done` of its
    worker, and goes back to the queue if the worker is lost.

    Parameters
    ----------
    crew : Crew
    trainer : BlockTrainer
        Keeps what clients keep, and their ledgers.
    instructions : Instructions
    timeout : float or None
    retries : int
        How many times a chunk may lose its worker before its clients are tried one by one, each
        on a worker that does nothing else meanwhile.
    into : RowSum, optional
        Takes the workers' sums of the rows that they train; without it blocks keep their rows.
    """

    def __init__(
        self,
        crew: Crew[Any],
        trainer: BlockTrainer,
        instructions: Instructions,
        timeout: float | None,
        *,
        retries: int,
        into: RowSum | None = None,
    ) -> None:
        self._crew, self._trainer, self._into = crew, trainer, into
        self._timeout, self._retries = timeout, retries
        # On the CPU whatever the trainer's device: it goes to processes by shared memory or Ray.
        self._start = instructions.vector.detach().cpu()
        ids = np.asarray(instructions.recipients.client_ids, dtype=np.int64)
        row_bytes = max(self._start.numel() * self._start.element_size(), 1)
        # Rows that are summed do not travel, so that a chunk of them may be of any size.
        largest = len(ids) if into is not None else max(1, _CHUNK_BYTES // row_bytes)
        cut = chunks(ids, trainer.costs(ids), workers=len(crew.workers), largest=largest)
        self._todo = deque(map(_Chunk, cut))
        self._call = RoundCall.of(
            replace(instructions, vector=self._start), None if into is None else into.summing
        )

    def blocks(self) -> Iterator[Block]:
        """In no particular order."""
        # An earlier round that was not read to its end has left answers behind.
        self._crew.begin()
        call = self._crew.shared(self._call)
        self._assignments = [_Assignment(worker) for worker in self._crew.workers]
        while True:
            for client_ids, reason in self._hand_out(call):
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

    def _hand_out(self, call: Any) -> list[tuple[Ids, Reason]]:
        """Give idle workers chunks; the clients that cannot begin, and why."""
        refused: list[tuple[Ids, Reason]] = []
        # Each worker is given a first chunk before any is given a second: at the end of a round two
        # chunks on one worker would keep another idle.
        for depth in range(1, self._crew.depth + 1):
            for assignment in self._assignments:
                while self._todo and assignment.takes(self._todo[0], depth):
                    chunk = self._todo.popleft()
                    try:
                        # Now and not earlier: a client that never begins is not charged.
                        states = self._entry_states(chunk)
                    except FedsimError as error:
                        # One of them refuses, and the others train.
                        if len(chunk.client_ids) > 1:
                            self._todo.extendleft(chunk.singles())
                            continue
                        _log.warning("client %s does not train: %s", chunk.client_ids[0], error)
                        over = isinstance(error, BudgetSpentError)
                        refused.append((chunk.client_ids, "budget" if over else "raised"))
                    else:
                        self._ask(assignment, chunk, states, call)
        for assignment in self._assignments:
            # Before a client that may lose its worker begins, what others did there is safe.
            if assignment.done and not assignment.busy and (not self._todo or self._todo[0].alone):
                assignment.worker.ask(WorkRequest(None))
                assignment.summing = True
        return refused

    def _ask(self, assignment: _Assignment, chunk: _Chunk, states: ClientStates, call: Any) -> None:
        if not assignment.begun:
            # Here, so that a worker that replaces another learns of the round too.
            assignment.worker.begin(call)
            assignment.begun = True
        if not assignment.queue:
            assignment.since = time.monotonic()
        assignment.worker.ask(WorkRequest(chunk.client_ids, states))
        assignment.queue.append(chunk)

    def _entry_states(self, chunk: _Chunk) -> ClientStates:
        """What these clients keep, once their lines are in their ledgers: both are here.

        Raises
        ------
        FedsimError
            If a ledger refuses, or what a client keeps cannot be read.
        """
        ids, number = chunk.client_ids, self._call.round
        if self._call.message_type == "evaluate":
            return self._trainer.state(ids, None)
        self._trainer.charge(self._start, ids, number)
        return self._trainer.state(ids, number)

    def _first_done(self, busy: list[_Assignment]) -> _Assignment | None:
        """The first with an answer; None once one has worked for the timeout on a chunk."""
        patience = None
        working = [assignment.since for assignment in busy if assignment.queue]
        if self._timeout is not None and working:
            patience = max(0.0, min(working) + self._timeout - time.monotonic())
        worker = self._crew.first_done([assignment.worker for assignment in busy], patience)
        return next((assignment for assignment in busy if assignment.worker is worker), None)

    def _received(self, assignment: _Assignment, answer: WorkerReply) -> Iterator[Block]:
        if answer.error is not None:
            # Of the sum or the trainer, not of a client: another worker would fail in the same way.
            raise answer.error
        if assignment.queue:
            assignment.done.append((assignment.queue.popleft(), answer))
            assignment.since = time.monotonic()
            if self._into is not None:
                # Its rows are in the worker's memory only: if that is lost, it is trained again.
                return
        else:
            assert self._into is not None
            self._into.total.merge(answer.tensors)
        # Nothing can undo these clients any more.
        done, assignment.done, assignment.summing = assignment.done, [], False
        for _, trained in done:
            if trained.tensors:
                self._trainer.keep(trained.tensors, self._call.round)
            yield from trained.blocks

    def _after_loss(self, assignment: _Assignment, error: Exception) -> Iterator[Block]:
        """Replace a worker that was lost.

        An answer that was on its way is lost with it, so that any client that it was
        asked for may be to blame. Only one that had the worker for itself surely is.
        """
        blamed = list(assignment.queue) or [chunk for chunk, _ in assignment.done]
        lost_ids = np.concatenate([chunk.client_ids for chunk in blamed])
        _log.warning("a worker was lost with clients %s: %s", lost_ids, error)
        # What it had finished is lost with its sum, but did not end it, unless nothing else could.
        innocent = [chunk for chunk, _ in assignment.done] if assignment.queue else []
        self._replace(assignment)
        self._todo.extendleft(innocent)
        for suspect in blamed:
            lost = replace(suspect, losses=suspect.losses + 1)
            if suspect.alone:
                yield Block.failed(suspect.client_ids, "missing")
            elif lost.losses < self._retries:
                self._todo.appendleft(lost)
            else:
                self._todo.extend(lost.singles(alone=True))

    def _after_timeout(self) -> Iterator[Block]:
        """Replace the workers that have worked too long on a chunk.

        It is not known which of the chunk's clients is slow: each is tried alone, with the full
        timeout of its own. So one that hangs takes time from no other.
        """
        late = time.monotonic() - (self._timeout or 0.0)
        for assignment in self._assignments:
            if not assignment.queue or assignment.since > late:
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
        self._assignments[index] = _Assignment(self._crew.replaced(assignment.worker))


def chunks(
    client_ids: Ids, costs: npt.NDArray[np.float64], *, workers: int, largest: int
) -> list[Ids]:
    """Chunks of clients in decreasing order of cost, at most ``largest`` clients each.

    Handed out one after another to whichever worker is free, they keep workers busy to the end,
    also where one is only three quarters as fast as the others: the first are few and large, the
    last ones small enough to even out. Clients with as many steps stand together, as a block wants
    them. Which worker trains a client changes no byte of it.

    Parameters
    ----------
    client_ids, costs : ``[n]``
    workers : int
    """
    order = np.argsort(-costs, kind="stable")
    done = np.concatenate([[0.0], np.cumsum(costs[order])])
    least = done[-1] / (LEAST_SHARE * workers)
    cut: list[Ids] = []
    start = 0
    while start < len(order):
        target = max(SHARE * (done[-1] - done[start]) / workers, least)
        # The client that reaches the target still belongs to the chunk.
        stop = int(np.searchsorted(done, done[start] + target))
        stop = min(max(stop, start + 1), start + largest, len(order))
        cut.append(client_ids[order[start:stop]])
        start = stop
    return cut

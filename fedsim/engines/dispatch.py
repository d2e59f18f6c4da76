"""One round over workers: who is asked for which clients, and what becomes of their replies.

Workers are Ray's or processes of this machine (`Crew`); a round knows only that they answer in
the order in which they are asked, or are lost. Where a strategy collects sums (`Collection`), a
worker adds up what it trains and gives one sum at the end: until that is here its clients are
not done, and if it is lost they are trained again, to the same bytes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from fedsim.engines.schedule import chunks
from fedsim.engines.training_worker import (
    Call,
    Work,
    WorkerReply,
    from_wire,
    to_arrays,
    to_tensors,
    to_views,
)
from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.rows.block import Block, Ids, Reason
from fedsim.rows.exchange import Collection, Instructions
from fedsim.rows.trainers import BlockTrainer, ClientStates

__all__ = ["RETRIES", "Crew", "Dispatch", "Worker", "WorkerLostError"]

_log = logging.getLogger(__name__)

RETRIES = 2
"""How many times clients may lose their worker before they are tried one by one."""
# No reply with rows is larger than this, if a single client's is not.
_CHUNK_BYTES = 64 << 20


class WorkerLostError(Exception):
    """A worker has ended before it answered."""


class Worker(Protocol):
    """A process that trains, seen from the one that drives the run."""

    def begin(self, call: Call) -> None:
        """Say what the round is about; returns once the worker has started."""

    def ask(self, work: Work) -> None:
        """Ask for something; `answer` gives what it says, in the order asked."""

    def answer(self) -> WorkerReply:
        """The next answer, which is there; its arrays are good until the worker is asked again.

        Raises
        ------
        WorkerLostError
            If the worker is.
        """


class Crew(Protocol):
    """The workers of an engine.

    Attributes
    ----------
    depth : int
        Chunks that a worker may be asked for at a time: with two, one waits at the worker while
        the answer to the other travels.
    """

    depth: int

    @property
    def workers(self) -> Sequence[Worker]:
        """Those that are there."""

    def replaced(self, worker: Worker) -> Worker:
        """End a worker, whatever it does; another in its place."""

    def begin(self) -> None:
        """Forget what was asked in an earlier round that nobody finished."""

    def first_done(self, busy: Sequence[Worker], seconds: float | None) -> Worker | None:
        """One of these whose answer is there or that was lost; None if none is in time."""

    def call(self, call: Call) -> Call:
        """What all workers are told, ready to be sent to each."""


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
        """Each of these clients by itself."""
        ids = self.client_ids
        return [_Chunk(ids[k : k + 1], self.losses, alone) for k in range(len(ids))]


@dataclass(frozen=True)
class _Trained:
    """What a worker said of a chunk, in memory of this process.

    Attributes
    ----------
    chunk
    blocks : list of Block
    states : mapping of name to Tensor
        What its clients keep afterwards.
    """

    chunk: _Chunk
    blocks: list[Block]
    states: ClientStates

    @classmethod
    def of(cls, chunk: _Chunk, answer: WorkerReply) -> _Trained:
        """Copied out of what is the worker's again when it is asked next."""
        return cls(chunk, [from_wire(wire) for wire in answer.blocks], to_tensors(answer.arrays))


@dataclass(eq=False)
class _Post:
    """A worker in this round.

    Attributes
    ----------
    worker
    queue : deque of _Chunk
        What it was asked for and has not answered.
    done : list of _Trained
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
    done: list[_Trained] = field(default_factory=list)
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

    Chunks of clients go to whoever is free, longest first. A worker that is lost is replaced and
    its clients are trained again; clients that keep losing their worker have failed. So has a
    client that alone takes a worker longer than the round's timeout.

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
    collection : Collection, optional
    """

    def __init__(
        self,
        crew: Crew,
        trainer: BlockTrainer,
        instructions: Instructions,
        timeout: float | None,
        *,
        retries: int,
        collection: Collection | None = None,
    ) -> None:
        self._crew, self._trainer, self._collection = crew, trainer, collection
        self._timeout, self._retries = timeout, retries
        self._start = instructions.vector.detach().cpu()
        ids = np.asarray(instructions.client_ids, dtype=np.int64)
        row_bytes = max(self._start.numel() * self._start.element_size(), 1)
        largest = len(ids) if collection is not None else max(1, _CHUNK_BYTES // row_bytes)
        cut = chunks(ids, trainer.costs(ids), workers=len(crew.workers), largest=largest)
        self._todo = deque(map(_Chunk, cut))
        self._call = Call(
            instructions.message_type,
            self._start.numpy(),
            instructions.round,
            dict(instructions.config),
            None if collection is None else collection.summing,
        )

    def blocks(self) -> Iterator[Block]:
        """In no particular order."""
        self._crew.begin()
        call = self._crew.call(self._call)
        self._posts = [_Post(worker) for worker in self._crew.workers]
        while True:
            for client_ids, reason in self._hand_out(call):
                yield Block.failed(client_ids, reason)
            busy = [post for post in self._posts if post.busy]
            if not busy:
                return
            post = self._first_done(busy)
            if post is None:
                yield from self._after_timeout()
                continue
            try:
                answer = post.worker.answer()
            except WorkerLostError as error:
                yield from self._after_loss(post, error)
                continue
            yield from self._taken(post, answer)

    def _hand_out(self, call: Call) -> list[tuple[Ids, Reason]]:
        """Give idle workers chunks; the clients that cannot begin, and why."""
        refused: list[tuple[Ids, Reason]] = []
        for depth in range(1, self._crew.depth + 1):
            for post in self._posts:
                while self._todo and post.takes(self._todo[0], depth):
                    chunk = self._todo.popleft()
                    try:
                        states = self._entering(chunk)
                    except FedsimError as error:
                        if len(chunk.client_ids) > 1:
                            self._todo.extendleft(chunk.singles())
                            continue
                        _log.warning("client %s does not train: %s", chunk.client_ids[0], error)
                        over = isinstance(error, BudgetSpentError)
                        refused.append((chunk.client_ids, "budget" if over else "raised"))
                    else:
                        self._ask(post, chunk, states, call)
        for post in self._posts:
            # Before a client that may lose its worker begins, what others did there is safe.
            if post.done and not post.busy and (not self._todo or self._todo[0].alone):
                post.worker.ask(Work("sum"))
                post.summing = True
        return refused

    def _ask(self, post: _Post, chunk: _Chunk, states: ClientStates, call: Call) -> None:
        if not post.begun:
            post.worker.begin(call)
            post.begun = True
        if not post.queue:
            post.since = time.monotonic()
        post.worker.ask(Work("clients", chunk.client_ids, to_arrays(states)))
        post.queue.append(chunk)

    def _entering(self, chunk: _Chunk) -> ClientStates:
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

    def _first_done(self, busy: list[_Post]) -> _Post | None:
        """A post whose answer is there; None once one has worked for the timeout on a chunk."""
        patience = None
        working = [post.since for post in busy if post.queue]
        if self._timeout is not None and working:
            patience = max(0.0, min(working) + self._timeout - time.monotonic())
        worker = self._crew.first_done([post.worker for post in busy], patience)
        return next((post for post in busy if post.worker is worker), None)

    def _taken(self, post: _Post, answer: WorkerReply) -> Iterator[Block]:
        if answer.error is not None:
            raise answer.error
        if post.queue:
            trained = _Trained.of(post.queue.popleft(), answer)
            post.since = time.monotonic()
            if self._collection is not None:
                post.done.append(trained)
            else:
                yield from self._settled(trained)
            return
        assert self._collection is not None
        self._collection.merge(to_views(answer.arrays))
        done, post.done, post.summing = post.done, [], False
        for trained in done:
            yield from self._settled(trained)

    def _settled(self, trained: _Trained) -> Iterator[Block]:
        """The blocks of clients that nothing can undo any more."""
        if trained.states:
            self._trainer.keep(trained.states, self._call.round)
        yield from trained.blocks

    def _after_loss(self, post: _Post, error: Exception) -> Iterator[Block]:
        """Replace a worker that was lost.

        An answer that was on its way is lost with it, so that whoever was asked of this worker
        may be to blame or not. Only a client that had it for itself is.
        """
        blamed = list(post.queue) or [trained.chunk for trained in post.done]
        lost_ids = np.concatenate([chunk.client_ids for chunk in blamed])
        _log.warning("a worker was lost with clients %s: %s", lost_ids, error)
        innocent = [trained.chunk for trained in post.done] if post.queue else []
        self._replace(post)
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

        Which of the chunk's clients is slow nobody knows: each of them is tried alone, with as
        much time of its own. So one that hangs takes time from no other.
        """
        late = time.monotonic() - (self._timeout or 0.0)
        for post in self._posts:
            if not post.queue or post.since > late:
                continue
            chunk = post.queue.popleft()
            _log.warning("clients %s have not finished in %s s", chunk.client_ids, self._timeout)
            self._todo.extendleft([trained.chunk for trained in post.done])
            self._todo.extendleft(reversed(post.queue))
            self._replace(post)
            if len(chunk.client_ids) > 1:
                self._todo.extend(chunk.singles())
            else:
                yield Block.failed(chunk.client_ids, "timeout")

    def _replace(self, post: _Post) -> None:
        index = self._posts.index(post)
        self._posts[index] = _Post(self._crew.replaced(post.worker))

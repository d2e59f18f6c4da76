"""A Flower Grid whose clients train on Ray workers, in blocks."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch import Tensor

from fedsim.engines.local import LocalGrid, require_trainer
from fedsim.engines.parcel import Parcel
from fedsim.engines.ray_worker import Arrays, WorkerTraining, from_wire, to_arrays, to_tensors
from fedsim.engines.schedule import chunks
from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.rows.exchange import (
    Block,
    BlockTrainer,
    Ids,
    Instructions,
    MessageType,
)

__all__ = ["RayGrid"]

_log = logging.getLogger(__name__)

# No reply of a worker is larger than this, if a single client's is not.
_CHUNK_BYTES = 64 << 20


class RayGrid(LocalGrid):
    """`LocalGrid`, with the training of blocks spread over Ray workers.

    Every worker holds the trainer, and the data once for a machine. Parameters go out once a
    round; chunks of clients go to whichever worker is free, longest first, and blocks come
    back as they are done, in no particular order. A worker that dies is replaced and its
    clients are trained again, to the same bytes; clients that keep killing their worker have
    failed. So has a client that alone takes a worker longer than the round's timeout.

    Parameters
    ----------
    trainer : BlockTrainer
        A copy of it is made on each worker's device.
    workers : int
        Number of worker processes; 0 for one a core, or as many as the GPUs hold.
    address : str, optional
        Ray cluster to join ("auto" for the one that this machine is in). By default a Ray of
        our own is started on this machine, and shut down again by `close`.
    cpus_per_worker, gpus_per_worker : float
        What Ray reserves for a worker; a fraction of a GPU lets several share one.
    retries : int
        How many times a chunk may lose its worker before its clients are tried one by one, each
        on a worker that does nothing else meanwhile.
    run_config, node_config, run_id
        As for `LocalGrid`.
    """

    def __init__(
        self,
        trainer: BlockTrainer,
        *,
        workers: int = 0,
        address: str | None = None,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float = 0.0,
        retries: int = 2,
        num_nodes: int | None = None,
        run_config: Mapping[str, Any] | None = None,
        node_config: Mapping[str, Any] | None = None,
        run_id: int = 1,
    ) -> None:
        require_trainer(trainer)
        if trainer.device.type == "cuda" and not gpus_per_worker:
            raise FedsimError(
                "engine.gpus-per-worker is 0 while engine.device is 'cuda'; it must be more (a "
                "fraction lets workers share a GPU), or engine.device must be 'cpu'."
            )
        super().__init__(
            trainer,
            num_nodes=num_nodes,
            run_config=run_config,
            node_config=node_config,
            run_id=run_id,
        )
        self._retries = retries
        self._started_ray = _start_ray(address, workers)
        self._options = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}
        self._workers: list[_Worker] = []
        try:
            self._parcel = _put_parcel(trainer)
            for _ in range(workers or _default_workers(cpus_per_worker, gpus_per_worker)):
                self._workers.append(self._new_worker())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, and Ray if this grid started it."""
        import ray

        for worker in self._workers:
            ray.kill(worker.actor)
        self._workers = []
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

    def _blocks(
        self, trainer: BlockTrainer, instructions: Instructions, timeout: float | None
    ) -> Iterator[Block]:
        import ray

        ids = np.asarray(instructions.client_ids, dtype=np.int64)
        vector = instructions.vector.detach().cpu()
        row_bytes = vector.numel() * vector.element_size()
        todo = deque(
            _Chunk(client_ids)
            for client_ids in chunks(
                ids,
                trainer.costs(ids),
                workers=len(self._workers),
                largest=max(1, _CHUNK_BYTES // max(row_bytes, 1)),
            )
        )
        call = _Call(
            instructions.message_type,
            ray.put(vector.numpy()),
            instructions.round,
            dict(instructions.config),
        )
        for idle in self._workers:
            idle.queue.clear()
        while todo or any(busy.queue for busy in self._workers):
            for refused in self._hand_out(trainer, todo, call, vector):
                yield Block.failed(refused, "budget")
            if not any(worker.queue for worker in self._workers):
                continue
            worker = self._first_done(timeout)
            if worker is None:
                yield from self._after_timeout(todo, timeout)
                continue
            chunk, reply = worker.take()
            try:
                blocks, states = ray.get(reply)
            except ray.exceptions.RayError as error:
                yield from self._after_loss(worker, chunk, error, todo)
                continue
            if states:
                trainer.keep(to_tensors(states), call.round)
            yield from (from_wire(block) for block in blocks)

    def _hand_out(
        self, trainer: BlockTrainer, todo: deque[_Chunk], call: _Call, start: Tensor
    ) -> list[Ids]:
        """Give idle workers chunks; the clients whose own budgets refuse."""
        refused: list[Ids] = []
        # Two at a time: the next one waits at the worker while the reply travels.
        for depth in (1, 2):
            for worker in self._workers:
                if not todo or len(worker.queue) >= depth or not worker.takes(todo[0]):
                    continue
                chunk = todo.popleft()
                if call.message_type == "evaluate":
                    worker.ask(call, chunk, to_arrays(trainer.state(chunk.client_ids)))
                elif _charged(trainer, chunk, start, call.round):
                    states = trainer.state(chunk.client_ids, call.round)
                    worker.ask(call, chunk, to_arrays(states))
                elif len(chunk.client_ids) > 1:
                    todo.extendleft(chunk.singles())
                else:
                    refused.append(chunk.client_ids)
        return refused

    def _first_done(self, timeout: float | None) -> _Worker | None:
        """A worker whose reply is there; None once one has worked for ``timeout`` on a chunk."""
        import ray

        busy = {worker.queue[0][1]: worker for worker in self._workers if worker.queue}
        patience = None
        if timeout is not None:
            first = min(worker.since for worker in busy.values())
            patience = max(0.0, first + timeout - time.monotonic())
        done, _ = ray.wait(list(busy), num_returns=1, timeout=patience, fetch_local=False)
        return busy[done[0]] if done else None

    def _after_loss(
        self, worker: _Worker, chunk: _Chunk, error: Exception, todo: deque[_Chunk]
    ) -> Iterator[Block]:
        """Replace a worker that was lost.

        A reply that was on its way is lost with it, so that whoever was asked of this worker may
        be to blame or not. Only a client that had it for itself is.
        """
        _log.warning("a worker was lost with clients %s: %s", chunk.client_ids, error)
        self._replace(worker)
        if chunk.alone:
            yield Block.failed(chunk.client_ids, "missing")
            return
        for suspect in (chunk, *(waiting for waiting, _ in worker.queue)):
            lost = replace(suspect, losses=suspect.losses + 1)
            if lost.losses < self._retries:
                todo.appendleft(lost)
            else:
                todo.extend(lost.singles(alone=True))

    def _after_timeout(self, todo: deque[_Chunk], timeout: float | None) -> Iterator[Block]:
        """Replace the workers that have worked too long on a chunk.

        Which of the chunk's clients is slow nobody knows: each of them is tried alone, with as
        much time of its own. So one that hangs takes time from no other.
        """
        late = time.monotonic() - (timeout or 0.0)
        for worker in list(self._workers):
            if not worker.queue or worker.since > late:
                continue
            chunk, _ = worker.take()
            _log.warning("clients %s have not finished in %s s", chunk.client_ids, timeout)
            self._replace(worker)
            todo.extendleft(reversed([waiting for waiting, _ in worker.queue]))
            if len(chunk.client_ids) > 1:
                todo.extend(chunk.singles())
            else:
                yield Block.failed(chunk.client_ids, "timeout")

    def _replace(self, worker: _Worker) -> None:
        import ray

        ray.kill(worker.actor)
        self._workers[self._workers.index(worker)] = self._new_worker()

    def _new_worker(self) -> _Worker:
        import ray

        device = "cuda" if self._options["num_gpus"] > 0 else "cpu"
        actor = ray.remote(WorkerTraining).options(**self._options).remote(self._parcel, device)
        return _Worker(actor)


@dataclass(frozen=True)
class _Call:
    """What all of a round's chunks have in common."""

    message_type: MessageType
    vector: Any
    round: int
    config: Mapping[str, object]


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


@dataclass(eq=False)
class _Worker:
    """A Ray actor, and the chunks that it was asked for with the replies to come.

    Attributes
    ----------
    actor, queue
    since : float
        When it began with the first of them, by `time.monotonic`.
    started : bool
        Whether its process is known to have started.
    """

    actor: Any
    queue: deque[tuple[_Chunk, Any]] = field(default_factory=deque)
    since: float = 0.0
    started: bool = False

    def ask(self, call: _Call, chunk: _Chunk, states: Arrays) -> None:
        """Ask for a chunk, whose clients keep these states."""
        import ray

        if not self.started:
            # That takes seconds, which are not its clients'.
            ray.wait([self.actor.ready.remote()])
            self.started = True
        if not self.queue:
            self.since = time.monotonic()
        arguments = (
            call.message_type,
            call.vector,
            chunk.client_ids,
            call.round,
            call.config,
            states,
        )
        self.queue.append((chunk, self.actor.work.remote(*arguments)))

    def takes(self, chunk: _Chunk) -> bool:
        """Whether it may be asked for a chunk beside what it was asked for."""
        return not self.queue or not (chunk.alone or self.queue[0][0].alone)

    def take(self) -> tuple[_Chunk, Any]:
        """The first chunk and its reply; the next one has begun."""
        self.since = time.monotonic()
        return self.queue.popleft()


def _charged(trainer: BlockTrainer, chunk: _Chunk, start: Tensor, round: int) -> bool:
    """Whether these clients' lines are in their ledgers, which are here, before they begin."""
    try:
        trainer.charge(start, chunk.client_ids, round)
    except BudgetSpentError as error:
        if len(chunk.client_ids) == 1:
            _log.warning("client %s refuses: %s", chunk.client_ids[0], error)
        return False
    return True


def _put_parcel(trainer: BlockTrainer) -> Any:
    import ray

    return ray.put(Parcel.pack(trainer.copy_for("cpu")))


def _start_ray(address: str | None, workers: int) -> bool:
    """Join a Ray or start one; whether it is ours to shut down."""
    import ray

    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Workers without a GPU train on the CPU because they are told to; else Ray warns each of them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    here: dict[str, Any] = {}
    if address is None:
        here = {
            "num_cpus": max(workers, len(os.sched_getaffinity(0))),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **here)
    return True


def _default_workers(cpus_per_worker: float, gpus_per_worker: float) -> int:
    import ray

    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if gpus_per_worker > 0:
        fits = int(resources.get("GPU", 0) / gpus_per_worker)
        if not fits:
            raise FedsimError(
                f"gpus_per_worker is {gpus_per_worker}, but Ray sees "
                f"{resources.get('GPU', 0):g} GPUs; it must be 0 to train on the CPU."
            )
        return fits
    return max(1, int(resources.get("CPU", 1) / max(cpus_per_worker, 0.01)))

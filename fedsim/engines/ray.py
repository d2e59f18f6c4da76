"""A Flower Grid whose clients train on Ray workers, in blocks."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from fedsim.engines.blocks import failed_block, guarded_blocks, messages_of
from fedsim.engines.devices import moved
from fedsim.engines.local import LocalGrid
from fedsim.engines.memory import Borrowed, memory_of
from fedsim.engines.parcel import Parcel
from fedsim.engines.process import settle
from fedsim.engines.schedule import chunks, client_costs
from fedsim.errors import FedsimError
from fedsim.rows.exchange import Block, BlockTrainer, Ids, Instructions, Kind, Replies
from fedsim.training.memory import Memory
from fedsim.training.trainer import Trainer

__all__ = ["RayGrid"]

_log = logging.getLogger(__name__)

# No reply of a worker is larger than this, if a single client's is not.
_CHUNK_BYTES = 64 << 20


class RayGrid(LocalGrid):
    """`LocalGrid`, with the training of blocks spread over Ray workers.

    Every worker holds the trainer, and the data once for a machine. Parameters go out once a
    round; chunks of clients go to whichever worker is free, longest first, and blocks come
    back as they are done, in no particular order. A worker that dies is replaced and its
    clients are trained again, to the same bytes; clients that keep killing their worker, or
    do not finish in time, have failed.

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
        How many times a chunk may lose its worker before its clients are tried one by one,
        and then each of them.
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
        if not hasattr(trainer, "population"):
            raise FedsimError(
                f"RayGrid trains a fedsim trainer's clients, not a {type(trainer).__name__}; "
                "run a ClientApp on LocalGrid, or in Flower's own simulation."
            )
        device = getattr(trainer, "device", torch.device("cpu"))
        if device.type == "cuda" and not gpus_per_worker:
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
        self._block_trainer = trainer
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
        kind: type[BaseException] | None,
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

    def _in_blocks(
        self, trainer: BlockTrainer, instructions: Instructions, deadline: float | None
    ) -> Replies:
        return Replies(
            lambda: self._blocks(instructions, deadline),
            lambda block: messages_of(instructions, block),
        )

    def _blocks(self, instructions: Instructions, deadline: float | None) -> Iterator[Block]:
        import ray

        ids = np.asarray(instructions.client_ids, dtype=np.int64)
        vector = instructions.vector.detach().cpu()
        row_bytes = vector.numel() * vector.element_size()
        todo = deque(
            _Chunk(part)
            for part in chunks(
                ids,
                client_costs(self._block_trainer, ids),
                workers=len(self._workers),
                largest=max(1, _CHUNK_BYTES // max(row_bytes, 1)),
            )
        )
        memory = memory_of(self._block_trainer) if instructions.kind == "train" else None
        call = _Call(instructions.kind, ray.put(vector.numpy()), instructions.round, memory)
        for idle in self._workers:
            idle.queue.clear()
        while todo or any(busy.queue for busy in self._workers):
            self._hand_out(todo, call)
            if (worker := self._first_done(deadline)) is None:
                self._replace_stuck()
                return
            chunk, reply = worker.queue.popleft()
            try:
                parts, borrowed = ray.get(reply)
            except ray.exceptions.RayError as error:
                yield from self._after_loss(worker, chunk, error, todo)
                continue
            if borrowed is not None and call.memory is not None:
                borrowed.give_back(call.memory, call.round)
            yield from (_from_wire(part) for part in parts)

    def _hand_out(self, todo: deque[_Chunk], call: _Call) -> None:
        # Two at a time: the next one waits at the worker while the reply travels.
        for depth in (1, 2):
            for worker in self._workers:
                if todo and len(worker.queue) < depth:
                    chunk = todo.popleft()
                    borrowed = (
                        None
                        if call.memory is None
                        else Borrowed.of(call.memory, chunk.client_ids, call.round)
                    )
                    worker.queue.append((chunk, worker.ask(call, chunk.client_ids, borrowed)))

    def _first_done(self, deadline: float | None) -> _Worker | None:
        import ray

        busy = {worker.queue[0][1]: worker for worker in self._workers if worker.queue}
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, _ = ray.wait(list(busy), num_returns=1, timeout=timeout, fetch_local=False)
        return busy[done[0]] if done else None

    def _after_loss(
        self, worker: _Worker, chunk: _Chunk, error: Exception, todo: deque[_Chunk]
    ) -> Iterator[Block]:
        """Replace a worker that was lost; what it had not begun is not to blame."""
        _log.warning("a worker was lost with clients %s: %s", chunk.client_ids, error)
        waiting = [queued for queued, _ in worker.queue]
        self._workers[self._workers.index(worker)] = self._new_worker()
        todo.extendleft(reversed(waiting))
        lost = replace(chunk, losses=chunk.losses + 1)
        if lost.losses < self._retries:
            todo.appendleft(lost)
        elif len(lost.client_ids) > 1:
            todo.extend(_Chunk(lost.client_ids[i : i + 1]) for i in range(len(lost.client_ids)))
        else:
            yield failed_block(lost.client_ids)

    def _replace_stuck(self) -> None:
        import ray

        for index, worker in enumerate(self._workers):
            if worker.queue:
                ray.kill(worker.actor)
                self._workers[index] = self._new_worker()

    def _new_worker(self) -> _Worker:
        import ray

        device = "cuda" if self._options["num_gpus"] > 0 else "cpu"
        actor = ray.remote(_Training).options(**self._options).remote(self._parcel, device)
        return _Worker(actor, deque())


@dataclass(frozen=True)
class _Call:
    """What all of a round's chunks have in common."""

    kind: Kind
    vector: Any
    round: int
    memory: Memory | None


@dataclass(frozen=True)
class _Chunk:
    """Clients that a worker is asked for at once, and how often they lost theirs."""

    client_ids: Ids
    losses: int = 0


@dataclass(eq=False)
class _Worker:
    """A Ray actor, and the chunks that it was asked for with the replies to come."""

    actor: Any
    queue: deque[tuple[_Chunk, Any]]

    def ask(self, call: _Call, client_ids: Ids, borrowed: Borrowed | None) -> Any:
        return self.actor.work.remote(call.kind, call.vector, client_ids, call.round, borrowed)


class _Training:
    """What runs in a worker process."""

    def __init__(self, parcel: Parcel, device: str) -> None:
        settle()
        trainer = parcel.unpack()
        self._device = device
        self._trainer: BlockTrainer = moved(trainer, device)

    def work(
        self,
        kind: Kind,
        vector: np.ndarray[Any, Any],
        client_ids: Ids,
        round: int,
        borrowed: Borrowed | None,
    ) -> tuple[list[Block], Borrowed | None]:
        if borrowed is not None:
            # The driver keeps what clients keep: whichever worker trains them next has it.
            cast(Trainer, self._trainer).memory = borrowed
        here: Tensor = torch.from_numpy(np.array(vector)).to(self._device)
        blocks = guarded_blocks(self._trainer, kind, here, np.array(client_ids), round)
        return [_to_wire(block) for block in blocks], borrowed


def _to_wire(block: Block) -> Block:
    # Ray ships numpy arrays out of band and tensors by pickling them.
    rows: Any = None if block.rows is None else block.rows.detach().cpu().numpy()
    return replace(block, rows=rows)


def _from_wire(block: Block) -> Block:
    rows: Any = block.rows
    # Copies: arrays in the object store are read-only, and pin its memory.
    return replace(
        block,
        rows=None if rows is None else torch.from_numpy(np.array(rows)),
        metrics={name: np.array(values) for name, values in block.metrics.items()},
    )


def _put_parcel(trainer: BlockTrainer) -> Any:
    import ray

    return ray.put(Parcel.pack(moved(trainer, "cpu")))


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

"""A Flower Grid whose clients train on Ray workers, in blocks."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedsim.engines.dispatch import RETRIES, Dispatch, Worker, WorkerLostError
from fedsim.engines.local import LocalGrid, require_trainer
from fedsim.engines.parcel import Parcel
from fedsim.engines.process import settle
from fedsim.engines.training_worker import Call, TrainingWorker, Work, WorkerReply
from fedsim.errors import FedsimError, RunFailedError
from fedsim.rows.block import Block
from fedsim.rows.exchange import Collection, Instructions
from fedsim.rows.trainers import BlockTrainer

__all__ = ["RayGrid"]


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
        retries: int = RETRIES,
        num_nodes: int | None = None,
        run_config: Mapping[str, Any] | None = None,
        node_config: Mapping[str, Any] | None = None,
        run_id: int = 1,
    ) -> None:
        import ray

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
        options = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}
        try:
            count = workers or _default_workers(cpus_per_worker, gpus_per_worker)
            self._actors = RayCrew(trainer, count, options)
        except BaseException:
            if self._started_ray:
                ray.shutdown()
            raise

    def close(self) -> None:
        """End the workers, and Ray if this grid started it."""
        import ray

        super().close()
        self._actors.close()
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

    @property
    def _sums(self) -> bool:
        return True

    def _blocks(
        self,
        trainer: BlockTrainer,
        instructions: Instructions,
        timeout: float | None,
        collection: Collection | None,
    ) -> Iterator[Block]:
        return Dispatch(
            self._actors,
            trainer,
            instructions,
            timeout,
            retries=self._retries,
            collection=collection,
        ).blocks()


class TrainingActor(TrainingWorker):
    """What runs in Ray's process."""

    def __init__(self, parcel: Parcel, device: str) -> None:
        settle()
        super().__init__(parcel.unpack(), device)

    def ready(self) -> None:
        """Reply, once the process has started."""


class RayWorker:
    """See `Worker`: a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.answers: deque[Any] = deque()
        self._started = False

    def begin(self, call: Any) -> None:
        """See `Worker`."""
        import ray

        if not self._started:
            # That takes seconds, which are not its clients'.
            ray.wait([self.actor.ready.remote()])
            self._started = True
        self.actor.begin.remote(call)

    def ask(self, work: Work) -> None:
        """See `Worker`."""
        self.answers.append(self.actor.work.remote(work))

    def answer(self) -> WorkerReply:
        """See `Worker`."""
        import ray

        try:
            answer: WorkerReply = ray.get(self.answers.popleft())
        except ray.exceptions.RayError as error:
            raise WorkerLostError(str(error)) from error
        return answer


class RayCrew:
    """See `Crew`."""

    depth = 2

    def __init__(self, trainer: BlockTrainer, count: int, options: Mapping[str, float]) -> None:
        self._options = options
        self._parcel = _put_parcel(trainer)
        self.workers: list[RayWorker] = []
        for _ in range(count):
            self.workers.append(self._new())

    def _new(self) -> RayWorker:
        import ray

        device = "cuda" if self._options["num_gpus"] > 0 else "cpu"
        actor = ray.remote(TrainingActor).options(**self._options).remote(self._parcel, device)
        return RayWorker(actor)

    def replaced(self, worker: Worker) -> RayWorker:
        """See `Crew`."""
        import ray

        index = next(i for i, present in enumerate(self.workers) if present is worker)
        ray.kill(self.workers[index].actor)
        self.workers[index] = self._new()
        return self.workers[index]

    def begin(self) -> None:
        """See `Crew`."""
        for worker in self.workers:
            worker.answers.clear()

    def first_done(self, busy: Sequence[Worker], seconds: float | None) -> Worker | None:
        """See `Crew`."""
        import ray

        by_answer = {w.answers[0]: w for w in self.workers if any(w is b for b in busy)}
        done, _ = ray.wait(list(by_answer), num_returns=1, timeout=seconds, fetch_local=False)
        return by_answer[done[0]] if done else None

    def call(self, call: Call) -> Any:
        """See `Crew`: in Ray's store, from which each machine takes it once."""
        import ray

        return ray.put(call)

    def close(self) -> None:
        """End the workers."""
        import ray

        for worker in self.workers:
            ray.kill(worker.actor)
        self.workers = []


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
    before = signal.getsignal(signal.SIGTERM)
    try:
        # Without an address Ray would join one that runs here, whosever it is.
        ray.init(
            address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **here
        )
    except Exception as error:  # Ray raises anything, a bare Exception too
        cause = " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__
        if address is None:
            raise RunFailedError(f"Ray did not start ({cause}).") from error
        raise FedsimError(
            f"engine.address = {address!r} could not be joined ({cause}); it must be the address "
            "of a Ray cluster that runs, or '' for one of this machine's own."
        ) from error
    finally:
        # Ray's own handler ends its processes and this one in the middle of a round. They end with
        # this one in any case.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
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

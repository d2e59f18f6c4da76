"""A Flower Grid whose clients train on Ray workers, in blocks."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.clientapp import ClientApp

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError, RunFailedError
from fedsim.federation.engines.dispatch import RETRIES
from fedsim.federation.engines.local import LocalGrid, require_trainer
from fedsim.federation.engines.process import use_one_thread
from fedsim.federation.engines.workers import (
    TrainingWorker,
    Worker,
    WorkerLostError,
    WorkerPool,
    WorkerReply,
    WorkRequest,
    pack,
    unpack,
)
from fedsim.federation.exchange import Instructions
from fedsim.process import usable_cores
from fedsim.rows.block import BlockTrainer


class RayGrid(LocalGrid):
    """`LocalGrid` that trains blocks on Ray workers.

    Every worker has a copy of the trainer; the data are stored once a machine. Parameters are sent
    once a round; chunks of clients go to free workers, most expensive first, and blocks return as
    they are done, in no particular order. A worker that dies is replaced and its clients are
    trained again, with the same bytes as result; clients that keep killing their worker fail. So
    does a client that alone takes a worker longer than the round's timeout.

    Parameters
    ----------
    trainer : BlockTrainer
        Copied to each worker's device.
    workers : int
        Number of worker processes; 0 for one a core, or as many as the GPUs hold.
    address : str, optional
        Ray cluster to join ("auto" for the one of this machine), if the environment variable
        RAY_ADDRESS names none. Without either a new local Ray is started, and shut down by `close`.
        No config can name one: Ray unpickles what a cluster sends.
    cpus_per_worker, gpus_per_worker : float
        Resources that Ray reserves for a worker; with a fraction of a GPU several share one. A
        trainer on a GPU has workers with one each by default, which must be of one kind.
    retries : int
        How many times a chunk may lose its worker before its clients are tried one by one, each
        on a worker that does nothing else meanwhile.
    num_nodes, run_id
        As for `LocalGrid`.
    """

    @check_arguments
    def __init__(
        self,
        trainer: BlockTrainer | ClientApp,
        *,
        workers: int = 0,
        address: str | None = None,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float = 0.0,
        retries: int = RETRIES,
        num_nodes: int | None = None,
        run_id: int = 1,
    ) -> None:
        import ray

        trainer = require_trainer(trainer)
        if trainer.device.type == "cuda":
            gpus_per_worker = gpus_per_worker or 1.0
        super().__init__(trainer, num_nodes=num_nodes, run_id=run_id, retries=retries)
        self._started_ray = _start_ray(address, workers)
        options = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}
        try:
            count = workers or _default_workers(cpus_per_worker, gpus_per_worker)
            self._pool = RayWorkerPool(trainer, count, options)
            self._pool.require_one_kind()
        except BaseException:
            if self._started_ray:
                ray.shutdown()
            raise

    def close(self) -> None:
        """End the workers, and Ray if this grid started it."""
        import ray

        super().close()
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False


Arrays = list[npt.NDArray[np.uint8]]
"""Result of `pack`, as arrays: Ray stores them out of band, each once a machine."""


def _arrays(value: object) -> Arrays:
    # By value, since workers cannot import the driver's main module.
    return [np.frombuffer(piece, np.uint8) for piece in pack(value, by_value=True)]


class TrainingActor:
    """Ray actor around a `TrainingWorker`; its arguments and answers are packed."""

    def __init__(self, trainer: Arrays, device: str, path: list[str]) -> None:
        use_one_thread()
        # The user's own modules are found where the driver finds them, also if Ray was started
        # elsewhere and before.
        sys.path[:0] = path
        # Not copied: the data stay in Ray's shared, read-only store, once for all workers.
        self._worker = TrainingWorker(unpack(trainer, copied=False), device)

    def ready(self) -> str:
        """Name of the worker's device; the reply says that the process has started."""
        return self._worker.device_name

    def begin(self, instructions: Arrays) -> None:
        """Begin a round."""
        self._worker.begin(unpack(instructions, copied=True))

    def work(self, request: Arrays) -> Arrays:
        """Train clients, or return their sum."""
        return _arrays(self._worker.work(unpack(request, copied=True)))


class RayWorker(Worker):
    """A worker that is a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.answers: deque[Any] = deque()
        self._started = False

    def begin(self, reference: Any) -> None:
        """Send the reference of `RayWorkerPool.shared`; returns once the actor has started."""
        import ray

        if not self._started:
            # Starting takes seconds, which must not count against its first clients' timeout.
            try:
                ray.get(self.actor.ready.remote())
            except ray.exceptions.RayActorError as error:
                if error.actor_init_failed:
                    cause = str(error).strip().splitlines()[-1]
                    raise RunFailedError(
                        f"a Ray worker cannot load the run ({cause}); each machine of a cluster "
                        "needs the same packages, and modules of your own at the same path."
                    ) from error
            self._started = True
        self.actor.begin.remote(reference)

    def ask(self, work: WorkRequest) -> None:
        """Call the actor, which executes its calls in order."""
        self.answers.append(self.actor.work.remote(_arrays(work)))

    def answer(self, *, copied: bool) -> WorkerReply:
        """The next answer; if not ``copied``, its arrays are in Ray's store."""
        import ray

        try:
            answer: WorkerReply = unpack(ray.get(self.answers.popleft()), copied=copied)
        except ray.exceptions.RayError as error:
            raise WorkerLostError(str(error)) from error
        return answer

    def end(self) -> None:
        """Kill the actor."""
        import ray

        ray.kill(self.actor)


class RayWorkerPool(WorkerPool[RayWorker]):
    """Ray actors, each with a copy of the trainer."""

    depth = 2

    def __init__(self, trainer: BlockTrainer, count: int, options: Mapping[str, float]) -> None:
        import ray

        self._options = options
        self._trainer = ray.put(_arrays(trainer.copy_for("cpu")))
        self._path = [os.getcwd(), *filter(None, sys.path)]
        super().__init__(count)

    def new_worker(self) -> RayWorker:
        """Start an actor, without waiting the second or two that it takes."""
        import ray

        device = "cuda" if self._options["num_gpus"] > 0 else "cpu"
        made = ray.remote(TrainingActor).options(**self._options)
        return RayWorker(made.remote(self._trainer, device, self._path))

    def require_one_kind(self) -> None:
        """Refuse GPUs of several kinds, on which a client's last bits would be each kind's own."""
        import ray

        if self._options["num_gpus"] > 0:
            ready = [worker.actor.ready.remote() for worker in self.workers]
            refuse_several_kinds({str(name) for name in ray.get(ready)})

    def begin(self) -> None:
        """Drop the answers that have not arrived yet."""
        for worker in self.workers:
            worker.answers.clear()

    def first_done(self, busy: Sequence[RayWorker], seconds: float | None) -> RayWorker | None:
        """The first worker whose next answer is in Ray's store."""
        import ray

        by_answer = {worker.answers[0]: worker for worker in busy}
        finished, _ = ray.wait(list(by_answer), num_returns=1, timeout=seconds, fetch_local=False)
        return by_answer[finished[0]] if finished else None

    def shared(self, instructions: Instructions) -> Any:
        """Reference to the instructions in Ray's store; each machine fetches them once."""
        import ray

        return ray.put(_arrays(instructions))


def refuse_several_kinds(names: Set[str]) -> None:
    """Refuse workers on devices of different names."""
    if len(names) > 1:
        raise FedsimError(
            f"Ray's workers have GPUs of different kinds ({', '.join(sorted(names))}), whose "
            "results differ in their last bits; CUDA_VISIBLE_DEVICES must name GPUs of one kind."
        )


def _start_ray(address: str | None, workers: int) -> bool:
    """Join a Ray cluster or start one; return whether this process must shut it down."""
    import ray

    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Workers without a GPU train on the CPU on purpose; without this, Ray warns in each of them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {}
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is None:
        options = {
            "num_cpus": max(workers, usable_cores()),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
    before = signal.getsignal(signal.SIGTERM)
    try:
        # With no address at all, Ray would join any cluster that runs on this machine.
        ray.init(
            address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **options
        )
    except Exception as error:  # Ray may raise any exception, even a bare Exception
        cause = " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__
        if address is None:
            raise RunFailedError(f"Ray did not start ({cause}).") from error
        raise FedsimError(
            f"the Ray cluster at {address!r} could not be joined ({cause}); RAY_ADDRESS must be "
            "the address of a running one, or unset to start Ray on this machine."
        ) from error
    finally:
        # Undo Ray's SIGTERM handler, which would end this process in the middle of a round. Ray's
        # processes end with this one in any case.
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

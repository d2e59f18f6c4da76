"""A Flower Grid whose clients train on Ray workers, in blocks."""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import threading
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError, RunFailedError
from fedsim.federation.engines.dispatch import RETRIES
from fedsim.federation.engines.local import LocalGrid, require_trainer
from fedsim.federation.engines.process import use_one_thread
from fedsim.federation.engines.workers import (
    Crew,
    RoundCall,
    TrainingWorker,
    Worker,
    WorkerLostError,
    WorkerReply,
    WorkRequest,
)
from fedsim.rows.block import BlockTrainer


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
        run_config: Mapping[str, Any] | None = None,
        node_config: Mapping[str, Any] | None = None,
        run_id: int = 1,
    ) -> None:
        import ray

        trainer = require_trainer(trainer)
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
            retries=retries,
        )
        self._started_ray = _start_ray(address, workers)
        options = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}
        try:
            count = workers or _default_workers(cpus_per_worker, gpus_per_worker)
            self._crew = RayCrew(trainer, count, options)
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


class TrainingActor(TrainingWorker):
    """What runs in Ray's process."""

    def __init__(self, parcel: Parcel, device: str) -> None:
        use_one_thread()
        super().__init__(parcel.unpack(), device)

    def ready(self) -> None:
        """Reply, once the process has started."""


class RayWorker(Worker):
    """A Ray actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.answers: deque[Any] = deque()
        self._started = False

    def begin(self, call: Any) -> None:
        """Send where the round's call lies in Ray's store; returns once the actor has started."""
        import ray

        if not self._started:
            # That takes seconds, which are not its clients'.
            ray.wait([self.actor.ready.remote()])
            self._started = True
        self.actor.begin.remote(call)

    def ask(self, work: WorkRequest) -> None:
        """Call the actor, which works through its calls one after another."""
        self.answers.append(self.actor.work.remote(work))

    def answer(self) -> WorkerReply:
        """The next answer, in memory of Ray's store."""
        import ray

        try:
            answer: WorkerReply = ray.get(self.answers.popleft())
        except ray.exceptions.RayError as error:
            raise WorkerLostError(str(error)) from error
        return answer

    def end(self) -> None:
        """Kill the actor."""
        import ray

        ray.kill(self.actor)


class RayCrew(Crew[RayWorker]):
    """Ray actors, each with a copy of the trainer."""

    depth = 2

    def __init__(self, trainer: BlockTrainer, count: int, options: Mapping[str, float]) -> None:
        import ray

        self._options = options
        self._parcel = ray.put(Parcel.pack(trainer.copy_for("cpu")))
        super().__init__(count)

    def new_worker(self) -> RayWorker:
        """Start an actor; it takes a second or two, for which this does not wait."""
        import ray

        device = "cuda" if self._options["num_gpus"] > 0 else "cpu"
        actor = ray.remote(TrainingActor).options(**self._options).remote(self._parcel, device)
        return RayWorker(actor)

    def begin(self) -> None:
        """Drop the answers that are still to come."""
        for worker in self.workers:
            worker.answers.clear()

    def first_done(self, busy: Sequence[RayWorker], seconds: float | None) -> RayWorker | None:
        """The first whose oldest answer is in Ray's store."""
        import ray

        by_answer = {worker.answers[0]: worker for worker in busy}
        done, _ = ray.wait(list(by_answer), num_returns=1, timeout=seconds, fetch_local=False)
        return by_answer[done[0]] if done else None

    def shared(self, call: RoundCall) -> Any:
        """Where the call lies in Ray's store, from which each machine takes it once."""
        import ray

        return ray.put(call)


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


# Smaller tensors are copied: they are not worth a buffer of their own, and what an
# algorithm keeps and changes in place (rates, counters) is among them.
_SHARED_FROM = 1 << 20


@dataclass(frozen=True)
class Parcel:
    """An object, with its large tensors apart as plain arrays.

    An object store that maps arrays into its readers' memory (Ray's does) holds the data
    once for all the processes of a machine. Tensors of a mebibyte and more are then
    read-only; parameters are always copied.

    Attributes
    ----------
    body : bytes
    arrays : list of ndarray
        The large tensors' values, in the order in which the body refers to them.
    """

    body: bytes
    arrays: list[npt.NDArray[Any]]

    @classmethod
    def pack(cls, value: object) -> Parcel:
        """Pack an object; classes and functions that workers cannot import go by value."""
        arrays: list[npt.NDArray[Any]] = []
        stream = io.BytesIO()
        _pickler_class()(stream, arrays).dump(value)
        return cls(stream.getvalue(), arrays)

    def unpack(self) -> Any:
        """The object, over this parcel's arrays."""
        return _Unpickler(io.BytesIO(self.body), self.arrays).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, arrays: list[npt.NDArray[Any]]) -> None:
        super().__init__(stream)
        self._arrays = arrays

    def persistent_load(self, pid: Any) -> Tensor:
        with warnings.catch_warnings():
            # It warns that the memory is not writable, which is meant.
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(self._arrays[pid])


def _pickler_class() -> Any:
    from ray.cloudpickle import CloudPickler

    class Pickler(CloudPickler):
        def __init__(self, stream: io.BytesIO, arrays: list[npt.NDArray[Any]]) -> None:
            super().__init__(stream, protocol=5)  # type: ignore[no-untyped-call]
            self._arrays = arrays
            # The tensors too: an id means something only while its object lives.
            self._known: dict[int, tuple[int, Tensor]] = {}

        def persistent_id(self, value: object) -> int | None:
            if type(value) is not Tensor or not _shareable(value):
                return None
            if id(value) not in self._known:
                self._known[id(value)] = (len(self._arrays), value)
                self._arrays.append(np.ascontiguousarray(value.detach().numpy()))
            return self._known[id(value)][0]

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, nn.Parameter):
                plain = np.array(value.detach().cpu().numpy())
                return _parameter, (plain, value.requires_grad)
            return super().reducer_override(value)  # type: ignore[no-untyped-call]

    return Pickler


def _shareable(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.numel() * tensor.element_size() >= _SHARED_FROM
    )


def _parameter(values: npt.NDArray[Any], requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(values.copy()), requires_grad=requires_grad)

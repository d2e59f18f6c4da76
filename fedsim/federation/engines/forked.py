"""Worker processes on this machine that share memory, forked when a run's first round begins.

A forked process has the trainer, its data (mapped files too) and the user's own classes without
sending or importing anything, so that workers start in milliseconds, also in a notebook or a script
from standard input. It trains on one torch thread, as this process does, and never returns to the
code that forked it. Threads of this process do not exist in the fork, and locks that they held (on
the screen or a log file) are never released there: a worker therefore writes to no log, and its
log records are sent with its next answer and logged here.

A round's parameters are in memory that all workers map; each worker's answers are in another such
memory of its own. It has no name in any file system, and is freed once the processes have ended.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedsim.errors import FedsimError
from fedsim.federation.engines.process import use_one_thread
from fedsim.federation.engines.workers import (
    TrainingWorker,
    Worker,
    WorkerLostError,
    WorkerPool,
    WorkerReply,
    WorkRequest,
    pack,
    picklable_error,
    unpack,
)
from fedsim.federation.exchange import Instructions
from fedsim.process import die_with_parent, usable_cores
from fedsim.rows.block import BlockTrainer

_log = logging.getLogger(__name__)

# On macOS, a forked process may not use the system's linear algebra library.
CAN_FORK = sys.platform == "linux"

_LINE = 64  # bytes of a cache line; arrays are aligned to it
_PATIENCE = 2.0

Spans = list[tuple[int, int]]
"""Positions and sizes of a pickled value and its arrays in shared memory."""


class SharedValue:
    """One value at a time, in memory shared with all processes that are forked later."""

    def __init__(self) -> None:
        # Anonymous and inherited by a fork: no name remains after a crash, and none is exchanged.
        self._file = os.memfd_create("fedsim")
        self._map: mmap.mmap | None = None

    def put(self, value: object) -> Spans:
        """Overwrite the last value; return the spans with which `get` finds the new one."""
        pieces = [memoryview(piece) for piece in pack(value)]
        spans: Spans = []
        end = 0
        for piece in pieces:
            spans.append((end, piece.nbytes))
            end += -(-piece.nbytes // _LINE) * _LINE
        memory = self._memory_of(end)
        for (start, size), piece in zip(spans, pieces, strict=True):
            memory[start : start + size] = piece
        return spans

    def get(self, spans: Spans, *, copied: bool = False) -> Any:
        """The value; unless ``copied``, its large arrays are valid until the next `put`."""
        memory = self._memory_of(sum(spans[-1]))
        return unpack([memory[start : start + size] for start, size in spans], copied=copied)

    def _memory_of(self, size: int) -> memoryview:
        if self._map is None or len(self._map) < size:
            # The file may be larger than this process's map: the other one may have enlarged it.
            length = max(os.fstat(self._file).st_size, size, mmap.PAGESIZE)
            # Reserve the memory: without it, a lack of memory would be a SIGBUS at a later write,
            # instead of an OSError here.
            os.posix_fallocate(self._file, 0, length)
            self._map = mmap.mmap(self._file, length)
        return memoryview(self._map)

    def close(self) -> None:
        """Release the memory."""
        os.close(self._file)
        self._map = None


class ForkedWorker(Worker):
    """A process forked from the one that drives the run; requests are sent through a pipe."""

    def __init__(
        self, trainer: BlockTrainer, rounds: SharedValue, connections: list[Connection]
    ) -> None:
        self._answers = SharedValue()
        self.connection, end_of_worker = Pipe()
        # Flush first, or both processes would write what is buffered.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        parent = os.getpid()
        self.pid = _fork()
        if self.pid == 0:
            # This is the worker. It must end here and never return, or two processes would run the
            # caller's code, with its `finally` clauses, files and ledgers.
            status = 1
            try:
                # While any process holds the driver's end of a pipe open, the worker at its other
                # end is not notified that the driver has ended.
                for inherited in (self.connection, *connections):
                    inherited.close()
                _become_worker(parent)
                _serve(trainer, end_of_worker, rounds, self._answers)
                status = 0
            finally:
                os._exit(status)
        end_of_worker.close()
        self.pending = 0

    def begin(self, reference: Spans) -> None:
        """Send the position of the round's instructions in the memory that all workers share."""
        self._send(reference)

    def ask(self, work: WorkRequest) -> None:
        """Send the request; the worker answers its requests in order."""
        self._send(work)
        self.pending += 1

    def _send(self, value: object) -> None:
        # If the worker has ended, `answer` raises.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps([bytes(piece) for piece in pack(value)]))

    def answer(self, *, copied: bool) -> WorkerReply:
        """The next answer; unless ``copied``, in memory that the following one overwrites."""
        try:
            spans, records = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise WorkerLostError(f"process {self.pid} has ended") from error
        self.pending -= 1
        for name, level, text in records:
            logging.getLogger(name).log(level, "%s", text)
        answer: WorkerReply = self._answers.get(spans, copied=copied)
        return answer

    def end(self, patience: float = 0.0) -> None:
        """End the process; kill it if it has not ended after ``patience`` seconds."""
        # An empty message makes it end after its current request.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(b"")
        self.connection.close()
        deadline = time.monotonic() + patience
        while not _has_ended(self.pid, os.WNOHANG):
            if time.monotonic() >= deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                _has_ended(self.pid, 0)
                break
            time.sleep(0.002)
        self._answers.close()


def _has_ended(pid: int, options: int) -> bool:
    try:
        return os.waitpid(pid, options)[0] == pid
    except ChildProcessError:  # other code has waited for it already
        return True


class ForkedWorkerPool(WorkerPool[ForkedWorker]):
    """Workers that are forked from this process.

    Parameters
    ----------
    trainer : BlockTrainer
        The workers have a snapshot of it: they see no later changes, except for clients' states.
    count : int
        Number of workers.

    Raises
    ------
    FedsimError
        If processes cannot be forked here.
    """

    # With two requests, driver and worker could each wait for the other to empty a full pipe.
    depth = 1

    def __init__(self, trainer: BlockTrainer, count: int) -> None:
        if not CAN_FORK:
            raise FedsimError(
                f"engine.workers is {count}; on {sys.platform} it must be 1, or engine.name 'ray'."
            )
        if trainer.device.type != "cpu":
            raise FedsimError(
                f"engine.workers is {count} on a {trainer.device.type} device; it must be 1 there, "
                "or engine.name 'ray', whose workers share GPUs."
            )
        if not can_train_forked(trainer):
            raise FedsimError(
                f"engine.workers is {count}, and torch cannot compute gradients in processes "
                "forked from this one, since it has computed some here and sees a GPU; it must be "
                "1, or engine.name 'ray', or CUDA_VISIBLE_DEVICES must be empty from the start."
            )
        self._trainer = trainer
        self._rounds = SharedValue()
        super().__init__(count)

    def new_worker(self) -> ForkedWorker:
        """Fork a worker."""
        connections = [worker.connection for worker in self.workers]
        return ForkedWorker(self._trainer, self._rounds, connections)

    def begin(self) -> None:
        """Replace the workers that still work for an earlier round."""
        # Their answers would be taken for this round's, and may never come.
        for worker in list(self.workers):
            if worker.pending:
                self.replace_worker(worker)

    def first_done(
        self, busy: Sequence[ForkedWorker], seconds: float | None
    ) -> ForkedWorker | None:
        """The first worker whose pipe has an answer, or was closed because its process ended."""
        readable = wait([worker.connection for worker in busy], seconds)
        return next((worker for worker in busy if worker.connection in readable), None)

    def shared(self, instructions: Instructions) -> Spans:
        """Store the instructions in memory that all workers share; return their position."""
        return self._rounds.put(instructions)

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.end(_PATIENCE)
        self.workers = []
        self._rounds.close()


class _Records(logging.Handler):
    """Collects a worker's log records, for the driver to log."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelno, record.getMessage()))


def _become_worker(parent: int) -> None:
    """Ignore signals meant for the driver, and end when the driver does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Both are sent to the whole process group, but the driver decides when workers end.
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    use_one_thread()


def _serve(
    trainer: BlockTrainer, connection: Connection, rounds: SharedValue, answers: SharedValue
) -> None:
    """Answer requests until the driver closes the connection."""
    # Replace the driver's handlers: a thread may have held a handler's lock at the time of the
    # fork, and no thread here would release it.
    log = _Records()
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers, logger.propagate = [], True
    logging.root.handlers = [log]

    def reply(answer: WorkerReply) -> None:
        # This overwrites the last answer, which the driver has read: it has one request at a time.
        spans = answers.put(answer)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        connection.send_bytes(pickle.dumps((spans, log.records)))
        log.records = []

    try:
        worker = TrainingWorker(trainer, "cpu")
        while body := _received(connection):
            request = unpack(pickle.loads(body), copied=True)
            if isinstance(request, WorkRequest):
                reply(worker.work(request))
            else:
                worker.begin(rounds.get(request, copied=True))
    except Exception as error:
        # Not caused by a client: the driver raises it when it reads this answer.
        reply(WorkerReply(error=picklable_error(error)))


def _received(connection: Connection) -> bytes:
    """The driver's next message; empty if the driver has ended."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return b""


def can_train_forked(trainer: BlockTrainer) -> bool:
    """Whether clients can be trained in processes that are forked from this one.

    Where there is a GPU, torch starts a thread for it in its first backward pass, even on the CPU.
    A forked process lacks this thread, and every backward pass in it raises. Only the path
    ``layered`` needs no backward pass, unless its gradients of single examples are checked. For
    other paths the question is tested, in a process that is forked and ends at once.
    """
    path = getattr(trainer, "path", None)
    if getattr(path, "name", "") == "layered" and getattr(trainer, "privacy", None) is None:
        return True
    pid = _fork()
    if pid == 0:
        status = 1
        try:
            with torch.enable_grad():
                torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns if there are other threads; the module's docstring says why that is safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# Multiplications that make a worker worthwhile, about 40 ms of one core. A worker's overhead in a
# round (about four requests, and sending and merging a sum) is a few milliseconds.
OPERATIONS = 2.0**29


def helpful_workers(operations: float, clients: float, device: torch.device) -> int:
    """Number of worker processes that make a round faster.

    Parameters
    ----------
    operations : float
        Multiplications in one client's local work.
    clients : float
        Expected number of clients in a round.
    device : torch.device

    Examples
    --------
    >>> helpful_workers(1e6, 100, torch.device("cpu"))
    1
    """
    if device.type != "cpu" or not CAN_FORK:
        return 1
    return max(1, min(usable_cores(), int(clients), int(operations * clients / OPERATIONS)))

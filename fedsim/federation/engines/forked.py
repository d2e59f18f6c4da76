"""Workers on this machine that share its memory: forked where a run's first round begins.

A forked process has the trainer, its data (also what is mapped from files) and the user's own
classes without anything being sent or imported again, so that workers start in milliseconds, in
a notebook as in a script from standard input. It trains on one torch thread, as this process
does, and never goes back to the code that forked it. Threads of this process do not exist there:
what they may hold locked (the screen, a log file) a worker does not touch, and what it logs is
logged here, with its next answer.

A round's parameters lie in memory that all workers map, each worker's answers in some of its own.
It has no name in any file system, and is gone once the processes have ended.
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
    Crew,
    RoundCall,
    TrainingWorker,
    Worker,
    WorkerLostError,
    WorkerReply,
    WorkRequest,
    pack,
    sendable,
    unpack,
)
from fedsim.process import die_with_parent, usable_cores
from fedsim.rows.block import BlockTrainer

_log = logging.getLogger(__name__)

# A forked process may not use what macOS computes with.
CAN_FORK = sys.platform == "linux"

_LINE = 64  # bytes of a cache line, on which each array begins
_PATIENCE = 2.0

Spans = list[tuple[int, int]]
"""Where a pickled value and its arrays lie in a file."""


class SharedValue:
    """One value at a time, in memory that all processes have which are forked later."""

    def __init__(self) -> None:
        # Anonymous and inherited by a fork: no name that could be left behind, nothing to agree on.
        self._file = os.memfd_create("fedsim")
        self._map: mmap.mmap | None = None

    def put(self, value: object) -> Spans:
        """Put a value in the place of the last one; what `get` needs to find it."""
        pieces = [memoryview(piece) for piece in pack(value)]
        spans: Spans = []
        end = 0
        for piece in pieces:
            spans.append((end, piece.nbytes))
            end += -(-piece.nbytes // _LINE) * _LINE
        memory = self._mapped(end)
        for (start, size), piece in zip(spans, pieces, strict=True):
            memory[start : start + size] = piece
        return spans

    def get(self, spans: Spans, *, copied: bool = False) -> Any:
        """The value; unless copied, large arrays lie here, until another value is put."""
        memory = self._mapped(sum(spans[-1]))
        return unpack([memory[start : start + size] for start, size in spans], copied=copied)

    def _mapped(self, size: int) -> memoryview:
        if self._map is None or len(self._map) < size:
            length = max(os.fstat(self._file).st_size, size, mmap.PAGESIZE)
            # Room that is not there is an error here, and not a signal where it is written to.
            os.posix_fallocate(self._file, 0, length)
            self._map = mmap.mmap(self._file, length)
        return memoryview(self._map)

    def close(self) -> None:
        """Let go of the memory."""
        os.close(self._file)
        self._map = None


class ForkedWorker(Worker):
    """A process that is forked from the one that drives the run, and asked through a pipe."""

    def __init__(self, trainer: BlockTrainer, calls: SharedValue, others: list[Connection]) -> None:
        self._answers = SharedValue()
        self.connection, end_of_worker = Pipe()
        # What is buffered here must not be written twice.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        parent = os.getpid()
        self.pid = _fork()
        if self.pid == 0:
            # From here on this is the worker. It must end here and not return, or two processes
            # would run the caller's code, and its `finally` clauses, files and ledgers.
            status = 1
            try:
                # Else a worker would not see that the driver is gone while another lives.
                for mine in (self.connection, *others):
                    mine.close()
                _become_worker(parent)
                _serve(trainer, end_of_worker, calls, self._answers)
                status = 0
            finally:
                os._exit(status)
        end_of_worker.close()
        self.pending = 0

    def begin(self, call: Spans) -> None:
        """Send where the round's call lies in the memory that all workers share."""
        self._send(call)

    def ask(self, work: WorkRequest) -> None:
        """Send the request; the worker answers its requests one after another."""
        self._send(work)
        self.pending += 1

    def _send(self, value: object) -> None:
        # One that is gone says so when it is asked for its answer.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps([bytes(piece) for piece in pack(value)]))

    def answer(self, *, copied: bool) -> WorkerReply:
        """The next answer; if not copied, in memory that the worker writes to when asked again."""
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
        """End the process, at once if it does not end by itself in time."""
        # Asked first, so that it ends between two requests; killed if it is in one for long.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(b"")
        self.connection.close()
        deadline = time.monotonic() + patience
        while not _reaped(self.pid, os.WNOHANG):
            if time.monotonic() >= deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                _reaped(self.pid, 0)
                break
            time.sleep(0.002)
        self._answers.close()


def _reaped(pid: int, options: int) -> bool:
    try:
        return os.waitpid(pid, options)[0] == pid
    except ChildProcessError:  # it was waited for elsewhere
        return True


class ForkedCrew(Crew[ForkedWorker]):
    """Workers that are forked from this process, of which each sums what it trains.

    Parameters
    ----------
    trainer : BlockTrainer
        As it is now; workers do not see what becomes of it later, but what its clients keep.
    count : int
        Number of workers.

    Raises
    ------
    FedsimError
        If processes cannot be forked here.
    """

    # An answer with rows may fill the pipe that a second request would come through.
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
                f"engine.workers is {count}, and torch cannot differentiate in processes that are "
                "forked from this one, since it has differentiated here and sees a GPU; it must be "
                "1, or engine.name 'ray', or CUDA_VISIBLE_DEVICES be set to nothing before."
            )
        self._trainer = trainer
        self._calls = SharedValue()
        super().__init__(count)

    def new_worker(self) -> ForkedWorker:
        """Fork a worker."""
        others = [worker.connection for worker in self.workers]
        return ForkedWorker(self._trainer, self._calls, others)

    def begin(self) -> None:
        """Replace the workers that still work for an earlier round."""
        # Their answers would be taken for this round's, and to wait for them may take for ever.
        for worker in list(self.workers):
            if worker.pending:
                self.replaced(worker)

    def first_done(
        self, busy: Sequence[ForkedWorker], seconds: float | None
    ) -> ForkedWorker | None:
        """The first whose pipe has an answer, or was closed because its process has ended."""
        done = wait([worker.connection for worker in busy], seconds)
        return next((worker for worker in busy if worker.connection in done), None)

    def shared(self, call: RoundCall) -> Spans:
        """Where the call lies in memory that all workers share."""
        return self._calls.put(call)

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.end(_PATIENCE)
        self.workers = []
        self._calls.close()


class _Records(logging.Handler):
    """Keeps what a worker logs, for the driver of the run to log."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelno, record.getMessage()))


def _become_worker(parent: int) -> None:
    """Leave the driver's signals to the driver, and end when it does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Both are sent to a whole group: the driver decides when workers end.
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    use_one_thread()


def _serve(
    trainer: BlockTrainer, connection: Connection, calls: SharedValue, answers: SharedValue
) -> None:
    """Answer requests until the driver closes the connection."""
    # A handler of the driver's may hold a lock that a thread had when this process was forked, and
    # which no thread here will release.
    log = _Records()
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers, logger.propagate = [], True
    logging.root.handlers = [log]

    def reply(answer: WorkerReply) -> None:
        # In place of the last answer, which the driver has taken in: it asks for one at a time.
        spans = answers.put(answer)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # Where the answer lies, and what was logged meanwhile.
        connection.send_bytes(pickle.dumps((spans, log.records)))
        log.records = []

    try:
        worker = TrainingWorker(trainer, "cpu")
        while body := _received(connection):
            request = unpack(pickle.loads(body), copied=True)
            if isinstance(request, WorkRequest):
                reply(worker.work(request))
            else:
                worker.begin(calls.get(request, copied=True))
    except Exception as error:
        # No client is to blame: the driver ends the run with it when it asks for an answer.
        reply(WorkerReply(error=sendable(error)))


def _received(connection: Connection) -> bytes:
    """What the driver has sent; nothing once it is gone."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return b""


def can_train_forked(trainer: BlockTrainer) -> bool:
    """Whether clients can be trained in processes that are forked from this one.

    Where there is a GPU, torch begins a thread for it in its first backward pass, on a CPU too. A
    forked process has no such thread, and each of its backward passes is an error. Only the path
    ``layered`` needs none, unless its gradients of single examples are checked.
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
        # Python warns of other threads; see above.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# About 40 ms of one core's work. What a worker costs a round (being asked four times, sending a
# sum, which is merged) is a few milliseconds: below this the round is no shorter for it.
OPERATIONS = 2.0**29


def helpful_workers(operations: float, clients: float, device: torch.device) -> int:
    """Number of processes among which a round is worth sharing out.

    Parameters
    ----------
    operations : float
        Multiplications that a client's local work takes.
    clients : float
        That are expected in a round.
    device : torch.device

    Examples
    --------
    >>> helpful_workers(1e6, 100, torch.device("cpu"))
    1
    """
    if device.type != "cpu" or not CAN_FORK:
        return 1
    return max(1, min(usable_cores(), int(clients), int(operations * clients / OPERATIONS)))

"""When a run keeps what it has reached, beside its rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from flwr.app import ConfigRecord

from fedsim.rows.exchange import KEEP_SINCE
from fedsim.runs.checkpoints import RunState
from fedsim.runs.directory import Row, RunDirectory
from fedsim.runs.resolve import Resolved
from fedsim.runs.stopping import Judge


class Checkpointing:
    """Saves a session's state when that is due, in a thread: nobody waits for the disk.

    Parameters
    ----------
    resolved : Resolved
    directory : RunDirectory
    state : callable
        Gives what is to be saved.
    done : int
        The round from which the run goes on.

    Attributes
    ----------
    train_config : ConfigRecord or None
        What clients are told in each round.
    """

    def __init__(
        self, resolved: Resolved, directory: RunDirectory, state: Callable[[], RunState], done: int
    ) -> None:
        self._state = state
        self._settings = resolved.config.checkpoint
        self._kept = directory.checkpoints
        self._sync_metrics = directory.sync_metrics
        self._best: float | None = None
        self._judge: Judge | None = None
        if self._settings.best:
            self._judge = Judge.of(resolved, "checkpoint.best", self._settings.best)
            best = self._kept.best()
            self._best = None if best is None else best.row.get(self._settings.best)
        self._saved = done
        self._since = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: list[Future[None]] = []
        self.train_config: ConfigRecord | None = None
        if self._settings.every and resolved.config.client.state == "client":
            self.train_config = ConfigRecord()
            self._tell_clients()

    def on_round(self, row: Row, write_row: Callable[[], None]) -> None:
        """Save the round if it is one of those that are kept; then write its row.

        Raises
        ------
        OSError
            If that cannot be done, or could not be done before.
        """
        self._look()
        number = int(row["round"])
        tasks: list[Callable[[], None]] = []
        if self._settings.every and number:
            if self._judge is not None and self._judge.improves(row, self._best):
                self._best = row[self._judge.metric]
                tasks.append(self._kept.writing(self._state(), "best"))
            waited = time.monotonic() - self._since
            if number % self._settings.every == 0 or 0 < self._settings.seconds <= waited:
                tasks.append(self._kept.writing(self._state()))
                self._saved, self._since = number, time.monotonic()
                self._tell_clients()
        if tasks:
            # A checkpoint counts on the rows before it.
            tasks.insert(0, self._sync_metrics)
        if tasks or self._pending:
            self._pending.append(self._thread.submit(_all, [*tasks, write_row]))
        else:
            write_row()

    def save(self, done: int) -> None:
        """Save the round that was made last, unless it is there."""
        self.wait()
        if self._settings.every and done != self._saved:
            self._sync_metrics()
            self._kept.save(self._state())
            self._saved = done

    def wait(self) -> None:
        """Until all that was saved is on the disk."""
        while self._pending:
            self._pending.pop(0).result()

    def _look(self) -> None:
        """Take note of what is done, and raise what it raised."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def _tell_clients(self) -> None:
        """To which round the run may go back: clients that keep their own state keep that."""
        if self.train_config is not None:
            self.train_config[KEEP_SINCE] = min(self._kept.rounds(), default=0)


def _all(tasks: list[Callable[[], None]]) -> None:
    for task in tasks:
        task()

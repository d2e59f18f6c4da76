"""Drive one run on a grid and keep what it leaves: the same on every engine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedsim.closing import end_on_signal
from fedsim.config.plan import entropy, stopping
from fedsim.federation.arrays import array_record, tensors
from fedsim.models import values_of
from fedsim.privacy.manifest import LEDGER_KEY, private_key
from fedsim.runs.callbacks import Callback, Callbacks, RunStatus
from fedsim.runs.checkpointing import Checkpointing
from fedsim.runs.checkpoints import RunState
from fedsim.runs.directory import Ended, Row, RunDirectory, row_text
from fedsim.runs.loggers import loggers
from fedsim.runs.preflight import columns_of
from fedsim.runs.resolve import CentralEvaluation, Resolved, strategy_of
from fedsim.runs.result import RunResult, statements
from fedsim.runs.stopping import EarlyStopping, Judge
from fedsim.runs.summary import leave_report, seal
from fedsim.strategies import Rounds, RunFailedError, round_timeout, rounds_of, run_to_end

YOURS = "yours"
"""Name of the callbacks of whoever has started the run."""

_log = logging.getLogger("fedsim")


class Session:
    """One run in progress: its strategy, and what it writes as it goes.

    In a round the ledger's line comes first, then the release, the callbacks, the checkpoint where
    one is due, and the row of metrics.csv.

    Parameters
    ----------
    resolved : Resolved
    directory : RunDirectory, optional
        Claimed already; the ledger, the metrics, checkpoints and the model go there.
    callbacks : mapping of str to Callback
        Beside those that the config asks for.
    resume : RunState, optional
        From where to go on: what `state` gave after a round of the same run.
    until : int, optional
        The round after which it pauses, to go on another time; its last one if not given.
    asked_elsewhere : callable
        Whether somebody in another process wants the run to end; asked after each round.
    """

    def __init__(
        self,
        resolved: Resolved,
        directory: RunDirectory | None = None,
        callbacks: Mapping[str, Callback] | None = None,
        *,
        resume: RunState | None = None,
        until: int | None = None,
        asked_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        self.resolved = resolved
        rounds = resolved.config.rounds
        self._until = rounds if until is None else min(until, rounds)
        self.strategy = strategy_of(resolved, directory.ledger if directory else None)
        self.evaluation = CentralEvaluation(resolved)
        self._arrays = resolved.initial_arrays
        self._rows: list[Row] = []
        self._directory = directory
        self._rows_code = None if directory is None else directory.rows_code()
        self._callbacks = Callbacks({**_of_config(resolved), **(callbacks or {})})
        if self.strategy.protects:
            resolved.trainer.join(self.strategy.ledger.run)
        if resume is not None:
            self._restore(resume)
        key = resolved.config.noise.ledger_key or os.environ.get(LEDGER_KEY, "")
        if key:
            private_key(Path(key))  # refused now, and not once the run has ended
        self._columns = columns_of(resolved, self.strategy)
        self._config = resolved.config.to_run_config()
        if directory is not None:
            directory.start_metrics(self._columns, self._rows)
        self._checkpoints: Checkpointing | None = None
        if directory is not None:
            done = self.strategy.rounds_done
            self._checkpoints = Checkpointing(resolved, directory, self.state, done)
        self._asked_to_end = False
        self._asked_elsewhere = asked_elsewhere
        self._since = time.perf_counter()

    def _restore(self, state: RunState) -> None:
        if self._directory is not None:
            before = {"head": state.ledger_head, "lines": state.ledger_length}
            self.strategy.ledger.restore(before)
            if self.resolved.client_ledgers is not None:
                self.resolved.client_ledgers.restore(state.client_ledgers)
        # Whether a budget still stops it is asked anew: it may have been raised.
        self.strategy.restore({**state.strategy, "stopped": None})
        self.resolved.trainer.keep(state.clients, state.round)
        self._arrays = array_record(state.parameters)
        self._rows = [state.row]
        if self._directory is not None and self._rows_code is not None:
            rows = self._directory.rows_before(state)
            for row in rows:
                self._rows_code.update(row_text(row))
            if len(rows) < state.metrics_length - 1:
                _log.warning(
                    "%s has lost rows of rounds before %s.", self._directory.metrics, state.round
                )
            self._rows = [*rows, state.row]
        self._callbacks.restore(state.callbacks)

    def state(self) -> RunState:
        """All that outlives the last round."""
        ledger, of_clients = self.strategy.ledger, self.resolved.client_ledgers
        return RunState(
            round=self.strategy.rounds_done,
            parameters=tensors(self._reached),
            strategy=self.strategy.state(),
            clients=self.resolved.trainer.state(),
            ledger_head=ledger.head,
            ledger_length=len(ledger.heads),
            metrics_length=len(self._rows),
            metrics_code="" if self._rows_code is None else self._rows_code.hexdigest(),
            row=self._rows[-1] if self._rows else {},
            config=self._config,
            client_ledgers={} if of_clients is None else of_clients.state(),
            callbacks=self._callbacks.state(),
        )

    def end(self) -> None:
        """Make the round that goes on the last one."""
        self._asked_to_end = True

    def rounds(self, grid: Grid) -> Rounds:
        """The run's rounds that are left, up to whoever sends their messages."""
        self._callbacks.on_start(self.status())
        self._stop_if_asked()
        return rounds_of(
            self.strategy,
            grid,
            self._arrays,
            range(self.strategy.rounds_done + 1, self._until + 1),
            train_config=None if self._checkpoints is None else self._checkpoints.train_config,
            evaluate_fn=self._evaluate,
            on_round=self._on_round,
        )

    def timeout(self, grid: Grid) -> float | None:
        """Seconds that a client may take on ``grid``, if there is a limit."""
        limit = self.resolved.config.engine.timeout
        return round_timeout(grid, limit, private=self.strategy.protects)

    def finish(self, *, whole: bool) -> None:
        """Write the model reached so far and, after a ``whole`` round, a checkpoint."""
        if self._checkpoints is not None and not whole:
            with suppress(OSError):  # the run has ended for a reason of its own
                self._checkpoints.wait()
        if self._directory is not None:
            # What is frozen is not in the run's arrays.
            frozen = values_of(self.resolved.model)
            ledger = self.strategy.ledger
            # Nothing here varies with engine or time: equal runs have equal files.
            about = {
                "ledger-head": ledger.head,
                "ledger-lines": len(ledger.heads),
                "release": self.resolved.release,
                "round": self.strategy.rounds_done,
            }
            self._directory.save_model(frozen | tensors(self._reached), about)
        if self._checkpoints is not None and whole:
            self._checkpoints.save(self.strategy.rounds_done)
        if self._directory is not None and whole:
            self._directory.finish(self.ended, self._why(self.ended))
        if self._directory is not None:
            seal(self._directory)
        self._callbacks.on_end(self.status(ended=self.ended if whole else None))

    def status(self, ended: Ended | None = None) -> RunStatus:
        """What callbacks see."""
        return RunStatus(
            config=self.resolved.config,
            round=self.strategy.rounds_done,
            row=self._rows[-1] if self._rows else {},
            arrays=self._reached,
            protects=self.strategy.protects,
            of_clients=self.resolved.data.split.of_clients,
            directory=self._directory,
            ended=ended,
            why="" if ended is None else self._why(ended),
        )

    def result(self, *, interrupted: bool = False) -> RunResult:
        """What the run has reached, and why it ended."""
        ended: Ended = "interrupted" if interrupted else self.ended
        return RunResult(
            metrics=self._rows,
            arrays=self._reached,
            statements=partial(
                statements,
                self.resolved.config,
                self.strategy.ledger,
                self.resolved.client_ledgers,
                ended,
            ),
            ended=ended,
            why=self._why(ended),
            directory=self._directory,
            notes=self.resolved.notes,
        )

    @property
    def ended(self) -> Ended:
        """How it has ended, if it has."""
        if self._callbacks.stopped is not None:
            return "stopped"
        if self.strategy.rounds_done >= self.resolved.config.rounds:
            return "finished"
        paused = self.strategy.rounds_done >= self._until
        return "interrupted" if self._asked_to_end or paused else "budget"

    def _why(self, ended: Ended) -> str:
        if ended == "interrupted":
            return "Interrupted; the model is the one of the last whole round."
        if ended == "budget":
            return f"Stopped before the budget was exceeded: {self.strategy.stopped}."
        return f"Stopped early: {self._callbacks.stopped}." if ended == "stopped" else ""

    @property
    def _reached(self) -> ArrayRecord:
        return self.strategy.result.arrays if self.strategy.result else self._arrays

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Central evaluation; the initial model's makes row 0 at once."""
        metrics = self.evaluation(server_round, arrays)
        if server_round == 0 and metrics is not None:
            self._take({"round": 0, **_numbers(metrics)})
        return metrics

    def _on_round(self, server_round: int, result: Result) -> None:
        """Row of a finished round."""
        report = self.strategy.report
        seconds = time.perf_counter() - self._since
        row: dict[str, float | int] = {"round": server_round}
        row |= _numbers(result.evaluate_metrics_serverapp.get(server_round))
        row |= _numbers(result.train_metrics_clientapp.get(server_round), "train-")
        row |= _numbers(result.evaluate_metrics_clientapp.get(server_round), "clients-")
        end = stopping(self._config, server_round)
        if self.strategy.private:
            spent = self.strategy.ledger.as_of(server_round, self.resolved.release)
            row["epsilon"] = end.epsilon(spent.accountant, spent.last_event, self.strategy.delta)
        if self.resolved.client_ledgers is not None:
            row["example-epsilon"] = self.resolved.client_ledgers.epsilon(
                server_round, self.resolved.release, end
            )
        if row.keys() & {"epsilon", "example-epsilon"}:
            row["simulated"] = int(entropy(self.resolved.config) == "config")
        if report is not None:
            row |= report.row()
            row |= report.info
            if report.update_norm is not None:
                row["update-norm"] = report.update_norm
            if (load := self.resolved.devices.load) is not None:
                row |= {"bytes-down": load.bytes_down, "bytes-up": load.bytes_up}
                row["virtual-seconds"] = load.seconds
            row["clients-per-second"] = report.usable / seconds
        row["seconds"] = seconds
        self._take(row)

    def _take(self, row: Row) -> None:
        # What clients report under names that the plan does not have is left out.
        row = {name: row[name] for name in self._columns if name in row}
        if self._rows and self._rows_code is not None:
            self._rows_code.update(row_text(self._rows[-1]))
        self._rows.append(row)
        self._callbacks.on_round(self.status())
        if self._checkpoints is not None and self._directory is not None:
            self._checkpoints.on_round(row, partial(self._directory.add_row, row))
        self._stop_if_asked()
        self._since = time.perf_counter()

    def _stop_if_asked(self) -> None:
        """Let no other round begin, if a callback or whoever has started the run says so."""
        self._asked_to_end |= self._asked_elsewhere()
        if self._callbacks.stopped is not None:
            self.strategy.stopped = self._callbacks.stopped
        elif self._asked_to_end:
            self.strategy.stopped = "it was asked to end"


def _of_config(resolved: Resolved) -> dict[str, Callback]:
    """The callbacks that a config asks for."""
    stop = resolved.config.stop
    asked: dict[str, Callback] = {}
    if stop.metric:
        judge = Judge.of(resolved, "stop.metric", stop.metric)
        asked["stop"] = EarlyStopping(judge, stop.patience)
    return asked | loggers(resolved.config.log.to)


def drive(
    resolved: Resolved,
    grid: Grid,
    directory: RunDirectory | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    *,
    asked_elsewhere: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Run all rounds of a config on ``grid``; parameters as for `Session`.

    Goes on from the last checkpoint in ``directory`` if there is one. The model reached so far is
    saved whatever ends the run; Ctrl-C and SIGTERM end it in good order.

    A run that is interrupted leaves no report and composes no statement: whoever sends SIGTERM
    sends SIGKILL soon after.
    """
    state = None if directory is None else directory.checkpoints.newest()
    session = Session(resolved, directory, callbacks, resume=state, asked_elsewhere=asked_elsewhere)
    failure: RunFailedError | None = None
    whole = False
    with end_on_signal(session.end):
        try:
            try:
                run_to_end(session.rounds(grid), grid, session.timeout(grid))
                whole = True
            except KeyboardInterrupt:
                pass
            except RunFailedError as error:
                failure = error
            finally:
                session.finish(whole=whole)
        except Exception as error:
            if directory is not None:
                error.add_note(directory.remains())
            raise
    result = session.result(interrupted=not whole)
    if result.ended != "interrupted" or failure is not None:
        leave_report(resolved, session.evaluation, result, str(failure or ""))
    if failure is not None:
        raise failure
    return result


def _numbers(record: MetricRecord | None, prefix: str = "") -> dict[str, float | int]:
    return {
        f"{prefix}{key}": float(value)
        for key, value in (record or {}).items()
        if isinstance(value, int | float)
    }

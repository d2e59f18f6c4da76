"""One run in progress, on any engine: its rounds, and what it writes after each."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedsim.errors import FedsimError, RunFailedError
from fedsim.federation.arrays import array_record, same_arrays, tensors
from fedsim.models import values_of
from fedsim.privacy import Ledger
from fedsim.privacy.ledger import LedgerPosition
from fedsim.privacy.manifest import signing_key
from fedsim.privacy.records import to_json
from fedsim.process import end_on_signal
from fedsim.runs.callbacks import Callback, Callbacks, EarlyStopping, Measure, RunStatus
from fedsim.runs.checkpoints import Checkpointing, RunState
from fedsim.runs.client_rows import ClientRows
from fedsim.runs.data_split import data_shape
from fedsim.runs.directory import RunDirectory
from fedsim.runs.loggers import loggers
from fedsim.runs.metrics import Row, update_digest
from fedsim.runs.record import RunResult
from fedsim.runs.resolve import (
    CentralEvaluation,
    Resolved,
    driver_charges_examples,
    make_strategy,
    open_ledger,
)
from fedsim.runs.round_rows import RoundRows
from fedsim.runs.run_ledgers import RunLedgers, RunOutcome, node_ledgers
from fedsim.runs.summary import write_report
from fedsim.strategies import Rounds, round_timeout, rounds_of, run_to_end

CALLERS_CALLBACKS = "yours"
"""Name, in checkpoints, of the callbacks that the caller passed to `fedsim.run`."""

_log = logging.getLogger("fedsim")


class Session:
    """One run in progress: its strategy, and what it writes after each round.

    The order in a round: the ledger's line, the release, the rows of client-metrics.csv, the
    callbacks, the checkpoint if one is due, the row of metrics.csv. So a checkpoint is never ahead
    of the ledger, and a row in metrics.csv never ahead of the checkpoint of its round.

    Parameters
    ----------
    resolved : Resolved
    directory : RunDirectory, optional
        A claimed directory, for the ledger, metrics, checkpoints and model.
    callbacks : mapping of str to Callback
        Callbacks by name, in addition to the config's own.
    resume : RunState, optional
        State of the same run to resume from.
    end_request : callable
        Returns whether another process has asked the run to end; called after each round.

    Attributes
    ----------
    end_requested : bool
        Whether a signal, another process or `end` has asked it to end.
    """

    def __init__(
        self,
        resolved: Resolved,
        directory: RunDirectory | None = None,
        callbacks: Mapping[str, Callback] | None = None,
        *,
        resume: RunState | None = None,
        end_request: Callable[[], bool] = lambda: False,
    ) -> None:
        self.resolved = resolved
        config = resolved.config
        run, out = (secrets.token_hex(16), None)
        if directory is not None:
            run, out = directory.run, directory.path
        self.strategy = make_strategy(resolved, open_ledger(resolved, "client", out))
        if driver_charges_examples(config):
            resolved.trainer.record_in(open_ledger(resolved, "example", out))
        self.evaluation, self._uncovered = CentralEvaluation(resolved), resolved.uncovered
        self._arrays = resolved.initial_arrays
        self._rows: list[Row] = []
        # Of all rows but the last: a checkpoint is written before its own row is in the file.
        self._rows_code = hashlib.sha256()
        self._directory = directory
        self._callbacks = Callbacks({**_config_callbacks(resolved), **(callbacks or {})})
        self.end_requested = False
        self._round_complete = True
        self._end_request = end_request
        if resume is not None:
            self._restore(resume)
        else:
            self.strategy.begin(run)
            if (examples := resolved.trainer.ledger) is not None:
                examples.resume(LedgerPosition(), run)
            resolved.trainer.join(run)
        signing_key(config.noise.ledger_key)  # refuses a bad key now rather than at the end
        self._round_rows = RoundRows(resolved, self.strategy)
        self._config = config.to_run_config()
        self._first_config = self._config if resume is None else resume.first_config
        self._checkpoints: Checkpointing | None = None
        self._client_rows: ClientRows | None = None
        if directory is not None:
            directory.metrics_file.start(self._round_rows.columns, self._rows)
            done = self.strategy.rounds_done
            self._client_rows = ClientRows(resolved, directory.client_metrics)
            self._client_rows.start(done)
            self._checkpoints = Checkpointing(
                resolved, directory, self.state, self._client_rows.sync, done
            )
        self._since = time.perf_counter()

    def _restore(self, state: RunState) -> None:
        examples, counted = self.resolved.trainer.ledger, state.strategy["ledger"]
        if self._directory is not None:
            self.strategy.ledger.check_extends(LedgerPosition(counted["head"], counted["length"]))
        if examples is not None:
            examples.check_extends(LedgerPosition(**state.examples))
        # Whether the budget stops the run is decided again: it may have been raised since.
        self.strategy.restore({**state.strategy, "stopped": None})
        if examples is not None:
            examples.resume(LedgerPosition(**state.examples), self.strategy.run)
        self.resolved.trainer.join(self.strategy.run)
        self.resolved.trainer.store_states(state.clients, state.round)
        self._arrays = array_record(state.parameters)
        self._rows = [state.row] if state.row else []
        self._callbacks.restore(state.callbacks)
        if self._directory is None:
            return
        file = self._directory.metrics_file
        rows = file.rows_before(state.metrics_length, state.metrics_code)
        if len(rows) < state.metrics_length - 1:
            _log.warning("%s has lost rows of rounds before %s.", file.path, state.round)
        for row in rows:
            update_digest(self._rows_code, row)
        self._rows = [*rows, *self._rows]

    def state(self) -> RunState:
        """State after the last round, for a checkpoint."""
        examples = self.resolved.trainer.ledger
        return RunState(
            round=self.strategy.rounds_done,
            parameters=tensors(self._arrays),
            strategy=self.strategy.state(),
            clients=self.resolved.trainer.state(),
            release=self.resolved.release,
            examples=to_json(LedgerPosition() if examples is None else examples.position),
            data=data_shape(self.resolved.data),
            metrics_length=len(self._rows),
            metrics_code=self._rows_code.hexdigest(),
            row=self._rows[-1] if self._rows else {},
            config=self._config,
            first_config=self._first_config,
            callbacks=self._callbacks.state(),
        )

    def end(self) -> None:
        """Ask the run to end after the current round."""
        self.end_requested = True

    def rounds(self, grid: Grid) -> Rounds:
        """The remaining rounds, as a generator; the caller sends their messages."""
        before = self._rows[-1:]
        self._callbacks.on_start(self.status())
        self._charge_rest()
        if self._checkpoints is not None and not self.strategy.rounds_done:
            # A log is cut back to its beginning, and its plan charged once in any case.
            evidence = self.strategy.randomness.seed is None
            self._checkpoints.begin(fixed=evidence and self.strategy.plan.closed)
        if self._rows[-1:] != before and self._directory is not None and self._checkpoints:
            self._directory.metrics_file.start(self._round_rows.columns, self._rows)
            self._checkpoints.save(self.strategy.rounds_done, force=True)
        self._stop_if_requested()
        return rounds_of(
            self.strategy,
            grid,
            self._arrays,
            range(self.strategy.rounds_done + 1, self.resolved.config.rounds + 1),
            train_config=None if self._checkpoints is None else self._checkpoints.train_config,
            evaluate_fn=self._evaluate,
            on_round=self._on_round,
        )

    def make_rounds(self, grid: Grid) -> None:
        """Make the remaining rounds on ``grid``."""
        limit = self.resolved.config.engine.timeout
        timeout = round_timeout(grid, limit, private=self.strategy.protects)
        run_to_end(self.rounds(grid), grid, timeout)

    def finish(self, *, round_complete: bool) -> None:
        """Write the model and, if the last round was complete, a checkpoint and how it ended."""
        self._round_complete = round_complete
        if self._directory is not None and self._checkpoints is not None:
            if not round_complete:
                with suppress(OSError):  # the error that ended the run matters more
                    self._checkpoints.wait()
            self._save_model(self._directory)
            if round_complete:
                self._checkpoints.save(self.strategy.rounds_done)
                self._directory.finish(self.outcome)
            self._directory.write_manifest()
        self._callbacks.on_end(self.status(self.outcome if round_complete else None))

    def _save_model(self, directory: RunDirectory) -> None:
        # The run's arrays have trained parameters only; the file has the frozen ones too.
        frozen = values_of(self.resolved.model)
        ledger = self.strategy.ledger
        # Nothing here depends on engine or time, so that equal runs have equal files, and a resume
        # that fails in its first round writes the bytes that the manifest, put back then, names.
        about = {
            "ledger-head": ledger.head,
            "ledger-lines": len(ledger.heads),
            "release": self.resolved.release,
            "round": self._rows[-1]["round"] if self._rows else 0,
        }
        directory.save_model(frozen | tensors(self._arrays), about)

    def status(self, ending: RunOutcome | None = None) -> RunStatus:
        """The run's status, for callbacks."""
        return RunStatus(
            config=self.resolved.config,
            round=self.strategy.rounds_done,
            # Shallow copies, whose entries callbacks may replace.
            row=dict(self._rows[-1]) if self._rows else {},
            arrays=same_arrays(self._arrays),
            protects=self.strategy.protects,
            uncovered=self._uncovered,
            directory=self._directory,
            outcome=ending,
            columns=self.resolved.data.dataset.columns,
        )

    def result(self) -> RunResult:
        """Result of the run: its metrics, parameters and statements, and why it ended."""
        return RunResult(
            metrics=self._rows,
            arrays=self._arrays,
            ledgers=self._ledgers(),
            directory=self._directory,
            notes=self.resolved.notes,
        )

    def _ledgers(self) -> RunLedgers:
        examples = self.resolved.trainer.ledger
        path = Path() if self._directory is None else self._directory.path
        own = [] if examples is None else [examples]
        if examples is None and self._directory is not None:
            own = [*map(Ledger.read, node_ledgers(path, self._config))]
        return RunLedgers(
            self._config,
            self.strategy.ledger,
            own,
            self.outcome,
            path=path,
            rows=self._rows,
            client_splits=self.resolved.read_client_splits,
        )

    @property
    def outcome(self) -> RunOutcome:
        """How the run ended; meaningful only once no further round is made."""
        made, stopped = self.strategy.rounds_done, self._callbacks.stopped
        if self._round_complete and stopped is not None:
            return RunOutcome("stopped", f"Stopped early: {stopped}.")
        if self._round_complete and made >= self.resolved.config.rounds:
            return RunOutcome("finished")
        if self._round_complete and not self.end_requested:
            why = f"Stopped before the budget was exceeded: {self.strategy.stopped}."
            return RunOutcome("budget", why)
        return RunOutcome(
            "interrupted", "Interrupted; the model is that of the last complete round."
        )

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Central evaluation of a round; that of the initial model finishes round 0."""
        metrics = self.evaluation(server_round, arrays)
        if server_round == 0 and metrics is not None:
            self._finish_round(self._round_rows.initial(metrics))
        return metrics

    def _on_round(self, server_round: int, result: Result) -> None:
        """Finish a round: make its row, call callbacks, save a checkpoint if one is due."""
        seconds, self._arrays = time.perf_counter() - self._since, result.arrays
        self._finish_round(self._round_rows.of_round(server_round, result, seconds))

    def _finish_round(self, row: Row) -> None:
        if self._rows:
            update_digest(self._rows_code, self._rows[-1])
        self._rows.append(row)
        if self._client_rows is not None:
            self._client_rows.append(self.strategy.evaluation, int(row["round"]))
        self._callbacks.on_round(self.status())
        self._charge_rest()
        if self._checkpoints is not None:
            self._checkpoints.on_round(self._rows[-1])
        self._stop_if_requested()
        self._since = time.perf_counter()

    def _charge_rest(self) -> None:
        """Charge all planned rounds once a callback has ended the run.

        The decision to stop may depend on released values, and then the number of releases does
        too: the ledger and the last row say so. A run that declares such ends is charged for all
        its rounds before the first.
        """
        done, rounds = self.strategy.rounds_done, self.resolved.config.rounds
        if self._callbacks.stopped is not None and done:
            self.strategy.charge_rest(rounds)
            self.resolved.trainer.charge_rest(done, rounds)
            self._rows[-1] = {**self._rows[-1], **self._round_rows.spent(done)}

    def _stop_if_requested(self) -> None:
        """Let no further round begin if a callback, a signal or another process asked to end."""
        self.end_requested |= self._end_request()
        if self._callbacks.stopped is not None:
            self.strategy.stopped = self._callbacks.stopped
        elif self.end_requested:
            self.strategy.stopped = "it was asked to end"


@contextmanager
def running_sessions(sessions: Sequence[Session]) -> Iterator[dict[int, Exception]]:
    """Context in which all rounds of these runs are made; write what each leaves behind.

    Ctrl-C and SIGTERM end the runs after the current round; the second one ends them at once. The
    current models are saved whatever ends the rounds. A run that was asked to end, and can be
    resumed, writes no report and composes no privacy statement, which would take too long: SIGTERM
    is usually followed by SIGKILL a few seconds later.

    Yields
    ------
    dict of int to Exception
        To be filled with the errors of failed runs, by index. An error that leaves the context
        ends all of them.
    """
    failed: dict[int, Exception] = {}
    round_complete = False

    def end() -> None:
        for session in sessions:
            session.end()

    with end_on_signal(end):
        try:
            yield failed
            round_complete = True  # the last round was completed: its state may be saved
        except KeyboardInterrupt:
            end()
        finally:
            for index, session in enumerate(sessions):
                session.finish(round_complete=round_complete and index not in failed)
    for index, session in enumerate(sessions):
        error = failed.get(index)
        resumable = session.end_requested and session.outcome.ended == "interrupted"
        if error is not None or not resumable:
            failure = "" if error is None else failure_sentence(error)
            write_report(session.resolved, session.evaluation, session.result(), failure)


def failure_sentence(error: Exception) -> str:
    """Why a run failed, for its summary."""
    named = isinstance(error, RunFailedError | FedsimError)
    return str(error) if named else f"{type(error).__name__}: {error}"


def _config_callbacks(resolved: Resolved) -> dict[str, Callback]:
    """Callbacks that the config asks for: early stopping and loggers."""
    stop = resolved.config.stop
    callbacks: dict[str, Callback] = {}
    if stop.metric:
        measure = Measure.of_column(resolved, "stop.metric", stop.metric)
        callbacks["stop"] = EarlyStopping(measure, stop.patience)
    return callbacks | loggers(resolved.config.log.to)

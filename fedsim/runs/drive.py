"""Drive one run on a grid and keep what it leaves: the same on every engine."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedsim.engines.arrays import array_record, tensors
from fedsim.models import values_of
from fedsim.privacy import Statement
from fedsim.privacy.signing import LEDGER_KEY, private_key, signature
from fedsim.runs.artefacts import RunDirectory
from fedsim.runs.build import Build
from fedsim.runs.columns import columns_of
from fedsim.runs.state import RunState
from fedsim.strategies import DPFedAvg, Rounds, round_timeout, rounds_of, run_to_end

__all__ = ["Observer", "Row", "RunResult", "Session", "drive"]

_log = logging.getLogger("fedsim")

Row = dict[str, float | int]
Observer = Callable[[Row], None]
Ended = Literal["finished", "budget", "interrupted"]


@dataclass(frozen=True)
class RunResult:
    """What a run reached.

    Attributes
    ----------
    metrics : list of dict
        One a round, round 0 being the initial model: the rows of metrics.csv.
    arrays : ArrayRecord
        The parameters.
    privacy : Statement
        Epsilon, delta, adjacency, level, and what they cover: at client level, unless the run
        is private at example level only.
    example_privacy : Statement or None
        The same at example level, where clients protect their examples.
    ended : "finished", "budget" or "interrupted"
    why : str
        One sentence, where the run ended early.
    directory : RunDirectory or None
        Where the artefacts are.
    """

    metrics: list[Row]
    arrays: ArrayRecord
    privacy: Statement
    example_privacy: Statement | None = None
    ended: Ended = "finished"
    why: str = ""
    directory: RunDirectory | None = field(default=None, compare=False)


class Session:
    """One run in progress: its strategy, and what it writes as it goes.

    Parameters
    ----------
    build : Build
    directory : RunDirectory, optional
        Claimed already; the ledger, the metrics and the model go there.
    observer : callable, optional
        Called with each row as it is written.
    resume : RunState, optional
        From where to go on: what `state` gave after a round of the same run.
    """

    def __init__(
        self,
        build: Build,
        directory: RunDirectory | None = None,
        observer: Observer | None = None,
        *,
        resume: RunState | None = None,
    ) -> None:
        self.build = build
        self.strategy = build.strategy(directory.ledger if directory else None)
        self._arrays = build.initial_arrays
        if resume is not None:
            self.strategy.restore(resume.strategy)
            build.trainer.restore(resume.clients)
            self._arrays = array_record(resume.parameters)
        key = build.config.noise.ledger_key or os.environ.get(LEDGER_KEY, "")
        self._key = private_key(Path(key)) if key else None
        self._directory = directory
        self._scribe = _Scribe(build, self.strategy, directory, observer)

    def state(self) -> RunState:
        """All that outlives the last round."""
        ledger = self.strategy.ledger
        return RunState(
            round=self.strategy.rounds_done,
            parameters=tensors(self._reached),
            strategy=self.strategy.state(),
            clients=self.build.trainer.state(),
            ledger_head=ledger.head,
            ledger_length=len(ledger.entries),
            metrics_length=len(self._scribe.rows),
            config_digest=hashlib.sha256(self.build.resolved.to_toml().encode()).hexdigest(),
        )

    def rounds(self, grid: Grid) -> Rounds:
        """The run's rounds that are left, up to whoever sends their messages."""
        return rounds_of(
            self.strategy,
            grid,
            self._arrays,
            range(self.strategy.rounds_done + 1, self.build.config.rounds + 1),
            evaluate_fn=self._scribe.evaluate,
            on_round=self._scribe.on_round,
        )

    def timeout(self, grid: Grid) -> float | None:
        """Seconds that a client may take on ``grid``, if there is a limit."""
        limit = self.build.config.engine.timeout
        return round_timeout(grid, limit, private=self.strategy.protects)

    def save(self) -> None:
        """Write the model reached so far, whole: what is frozen is not in the run's arrays."""
        if self._directory is not None:
            frozen = values_of(self.build.model)
            ledger = self.strategy.ledger
            # Nothing here varies with engine or time: equal runs have equal files.
            about = {
                "ledger-head": ledger.head,
                "ledger-lines": len(ledger.heads),
                "release": self.build.release,
            }
            self._directory.save_model(frozen | tensors(self._reached), about)
            if self._key is not None:
                self._directory.sign_ledger(signature(self._key, ledger.head, len(ledger.heads)))

    def result(self, interrupted: bool = False) -> RunResult:
        """What the run has reached, and why it ended."""
        ended: Ended = "finished"
        why = ""
        if interrupted:
            ended, why = "interrupted", "Interrupted; the model is the one of the last whole round."
        elif self.strategy.stopped is not None:
            ended = "budget"
            why = f"Stopped before the budget was exceeded: {self.strategy.stopped}."
        privacy, examples = self.build.statements(self.strategy.privacy_statement())
        return RunResult(
            metrics=self._scribe.rows,
            arrays=self._reached,
            privacy=privacy,
            example_privacy=examples,
            ended=ended,
            why=why,
            directory=self._directory,
        )

    @property
    def _reached(self) -> ArrayRecord:
        return self.strategy.result.arrays if self.strategy.result else self._arrays


def drive(
    build: Build,
    grid: Grid,
    directory: RunDirectory | None = None,
    observer: Observer | None = None,
) -> RunResult:
    """Run all rounds of ``build.config`` on ``grid``; parameters as for `Session`.

    The model reached so far is saved whatever ends the run; Ctrl-C ends it in good order.
    """
    session = Session(build, directory, observer)
    rounds = session.rounds(grid)
    interrupted = False
    try:
        run_to_end(rounds, grid, session.timeout(grid))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        session.save()
    return session.result(interrupted)


class _Scribe:
    """Makes one row of each round and hands it on."""

    def __init__(
        self,
        build: Build,
        strategy: DPFedAvg,
        directory: RunDirectory | None,
        observer: Observer | None,
    ) -> None:
        self.rows: list[Row] = []
        self._build = build
        self._strategy = strategy
        self._directory = directory
        self._observer = observer
        self._columns = columns_of(build, strategy)
        if directory is not None:
            directory.start_metrics(self._columns)
        self._since = time.perf_counter()

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Central evaluation; the initial model's makes row 0 at once."""
        metrics = self._build.evaluate(server_round, arrays)
        if server_round == 0 and metrics is not None:
            self._write({"round": 0, **_numbers(metrics)})
        return metrics

    def on_round(self, server_round: int, result: Result) -> None:
        """Row of a finished round."""
        report = self._strategy.report
        seconds = time.perf_counter() - self._since
        row: Row = {"round": server_round}
        row |= _numbers(result.evaluate_metrics_serverapp.get(server_round))
        row |= _numbers(result.train_metrics_clientapp.get(server_round), "train-")
        row |= _numbers(result.evaluate_metrics_clientapp.get(server_round), "clients-")
        if self._strategy.private:
            row["epsilon"] = self._strategy.ledger.epsilon(self._strategy.delta)
        if self._build.client_ledgers is not None:
            row["example-epsilon"] = self._build.client_ledgers.epsilon()
        if row.keys() & {"epsilon", "example-epsilon"}:
            row["simulated"] = int(self._build.entropy == "config")
        if report is not None:
            row |= report.row()
            row |= report.info
            row["clients-per-second"] = report.usable / seconds
        row["seconds"] = seconds
        self._write(row)

    def _write(self, row: Row) -> None:
        # What clients report under names that the plan does not have is left out.
        row = {name: row[name] for name in self._columns if name in row}
        self.rows.append(row)
        if self._directory is not None:
            self._directory.add_row(row)
        if self._observer is not None:
            try:
                self._observer(row)
            except Exception:
                _log.exception("the run goes on, but its observer failed in round %s", row["round"])
        self._since = time.perf_counter()


def _numbers(record: MetricRecord | None, prefix: str = "") -> Row:
    return {
        f"{prefix}{key}": float(value)
        for key, value in (record or {}).items()
        if isinstance(value, int | float)
    }

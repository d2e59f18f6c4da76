"""Make the runs of a sweep, in common blocks where possible, and note how each ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedsim.config import RunConfig
from fedsim.config.release_keys import split_settings, training_settings
from fedsim.datasets import Dataset
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError, RunFailedError, keep_user_frames
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.checkpoints import Checkpoints, RunState
from fedsim.runs.data_split import load_dataset, resolve_data
from fedsim.runs.directory import RunDirectory
from fedsim.runs.factories import algorithm
from fedsim.runs.metrics import Row
from fedsim.runs.preflight import check
from fedsim.runs.resolve import Resolved, resolve
from fedsim.runs.resume import resolved_settings
from fedsim.runs.run_ledgers import RunOutcome
from fedsim.runs.session import CALLERS_CALLBACKS, Session, failure_sentence, running_sessions
from fedsim.runs.sweep.grid import SweepRun
from fedsim.runs.sweep.lockstep import advance_in_lockstep

_log = logging.getLogger("fedsim")

Observer = Callable[[SweepRun, Row], None]


@dataclass(frozen=True)
class _Sweep:
    """The sweep's directory, the observer of rows, and the data sets that runs share."""

    out: Path
    observer: Observer | None
    datasets: dict[object, Dataset] = field(default_factory=dict)

    def resolve(self, run: SweepRun) -> Resolved:
        """Resolve a run; each data set is read once for all runs."""
        data = resolve_data(run.config, load=self._load)
        return resolve(run.config, out=self.out / run.label, data=data)

    def _load(self, config: RunConfig) -> Dataset:
        """Load the data set of a ``[data]`` table, once for private and once for other runs.

        They differ: in a private run other examples count as unusable.
        """
        flat = config.to_run_config().items()
        table = tuple((key, value) for key, value in flat if key.startswith("data."))
        if (key := (config.protects, table)) not in self.datasets:
            self.datasets[key] = load_dataset(config)
        return self.datasets[key]


def run_sweep(
    grid: Sequence[SweepRun],
    out: Path,
    observer: Observer | None = None,
) -> dict[str, RunOutcome]:
    """Make the runs of a grid that have not ended in ``out`` yet.

    If a run diverges or raises, it has failed, and the others continue. A run that failed for a
    reason that would recur (too many rounds without a usable reply) is not repeated.

    Parameters
    ----------
    grid : sequence of SweepRun
    out : path
        The sweep's directory, in which each run gets its own.
    observer : callable, optional
        Called with each row of each run.

    Returns
    -------
    dict of str to RunOutcome
        How each run ended, by its label.

    Raises
    ------
    FedsimError
        If ``out`` has a run of another sweep, or a run's engine is not 'local'.
    """
    grid = [load_saved_config(run, out) for run in grid]
    for run in grid:
        if (engine := run.config.engine.name) != "local":
            raise FedsimError(f"engine.name = '{engine}'; a sweep's runs run on 'local'.")
    _check_same_clients(grid)
    sweep = _Sweep(out, observer)
    for run in grid:
        directory = RunDirectory(out / run.label)
        if directory.done.exists():
            continue
        resolved = sweep.resolve(run)
        if not directory.holds_run():
            directory.check_available(overwrite=True)
        check(resolved)
    return _run_all(grid, sweep)


def _check_same_clients(grid: Sequence[SweepRun]) -> None:
    """Refuse a shared ledger if runs split examples differently."""
    private = [run.config for run in grid if run.config.protects]
    splits = {tuple(split_settings(config).items()) for config in private}
    shared = {config.privacy.ledger for config in private} - {""}
    if len(splits) > 1 and shared:
        raise FedsimError(
            f"privacy.ledger = '{min(shared)}'; in this sweep it must be empty: runs assign "
            "examples to clients differently (seed, data or partition), and the costs of different "
            "people cannot be added up."
        )


def _run_all(grid: Sequence[SweepRun], sweep: _Sweep) -> dict[str, RunOutcome]:
    """Make the runs to their ends."""
    out = sweep.out
    pending_runs = [run for run in grid if not _is_complete(run, out)]
    outcomes: dict[str, RunOutcome] = {}
    for group in _groups(pending_runs, out):
        outcomes |= _run_group(group, sweep)
    return {run.label: RunOutcome.read(out / run.label) for run in grid} | outcomes


def _is_complete(run: SweepRun, out: Path) -> bool:
    """Whether a run of ``out``, whose config `run_sweep` has compared, has written everything."""
    directory = RunDirectory(out / run.label)
    # The report is a run's last file: a run that was killed before it was written is resumed, also
    # at its end, to write the missing files.
    return directory.report.exists() and directory.done.exists()


def has_run_ended(run: SweepRun, out: Path) -> bool:
    """Whether the run has ended in ``out``; raises like `load_saved_config`."""
    load_saved_config(run, out)
    return RunDirectory(out / run.label).done.exists()


def load_saved_config(run: SweepRun, out: Path) -> SweepRun:
    """The run with the resolved config of its directory in ``out``; unchanged if it has none.

    Raises
    ------
    FedsimError
        If its directory has a run of another config.
    """
    directory = RunDirectory(out / run.label)
    if not directory.config.exists():
        return run
    config = RunConfig.load(directory.config)
    start = config.to_run_config()
    if resolved_settings(run.config, start, start) != start:
        raise FedsimError(f"{directory.path} holds a run of another config; choose another --out.")
    return SweepRun(run.point, config)


def _groups(pending_runs: Sequence[SweepRun], out: Path) -> list[list[SweepRun]]:
    """Group runs whose clients can share blocks, starting from the same round."""
    groups: dict[tuple[object, ...], list[SweepRun]] = {}
    for run in pending_runs:
        state = _last_state(RunDirectory(out / run.label))
        first = 0 if state is None else state.round
        groups.setdefault((first, *_shared_work_key(run)), []).append(run)
    return list(groups.values())


def _last_state(directory: RunDirectory) -> RunState | None:
    """The last checkpoint of a run; None if it has none."""
    return Checkpoints(directory.checkpoint).newest() if directory.holds_run() else None


def _shared_work_key(run: SweepRun) -> tuple[object, ...]:
    """Key of the runs whose clients may share blocks.

    It has all that clients' training depends on, without numbers that may differ within a block.
    """
    config, client, trained_by = run.config, run.config.client, algorithm(run.config)
    if client.mechanism.name != "none" or client.state != "reset" or client.work:
        # Ledgers, state and amounts of work belong to the clients of one run.
        return (run.label,)
    free = {f"client.{name.replace('_', '-')}" for name in trained_by.numbers()}
    # A block has one copy of frozen parameters, whose values depend on the seed.
    frozen = config.model.trainable or config.adapter.name != "none"
    return (
        config.protects,  # it decides which examples are usable, and how classes are counted
        # If `for_run` changed the algorithm, it may depend on the mechanism of the run's updates.
        "" if trained_by == client.make() else str(config.mechanism.to_tree()),
        config.seed if frozen else None,
        *(setting for setting in training_settings(config) if setting[0] not in free),
    )


def _run_group(group: Sequence[SweepRun], sweep: _Sweep) -> dict[str, RunOutcome]:
    directories = [RunDirectory(sweep.out / run.label) for run in group]
    with ExitStack() as claims:
        sessions = []
        for run, directory in zip(group, directories, strict=True):
            resolved = sweep.resolve(run)
            text = resolved.config.to_toml()
            state = _last_state(directory)
            # Without a checkpoint too: what evidence has of its rounds stays charged.
            resumed = directory.holds_run()
            claims.enter_context(
                directory.lock_for_resume(text)
                if resumed
                else directory.claim(text, overwrite=True)
            )
            watching = (
                {} if sweep.observer is None else {CALLERS_CALLBACKS: _Watcher(run, sweep.observer)}
            )
            sessions.append(Session(resolved, directory, watching, resume=state))
        with running_sessions(sessions) as failed:
            failed |= _make_rounds(sessions)
        endings = {index: RunOutcome("failed", failure_sentence(e)) for index, e in failed.items()}
        for index, error in failed.items():
            if isinstance(error, RunFailedError):  # a repetition would fail again
                directories[index].finish(endings[index])
            else:
                keep_user_frames(error)
                _log.error("a run of the sweep raised", exc_info=error)
        if any(session.end_requested for session in sessions):
            raise KeyboardInterrupt
    return {group[index].label: ending for index, ending in endings.items()}


def _make_rounds(sessions: Sequence[Session]) -> dict[int, Exception]:
    """Make all rounds of these sessions; return the errors of failed ones, by index."""
    runs = [(session, LocalGrid(session.resolved.trainer)) for session in sessions]
    resolved = [session.resolved for session in sessions]
    if len(runs) > 1 and _have_equal_buffers(resolved):
        return advance_in_lockstep([session.rounds(grid) for session, grid in runs], resolved)
    failed: dict[int, Exception] = {}
    for index, (session, grid) in enumerate(runs):
        try:
            session.make_rounds(grid)
        except Exception as error:
            failed[index] = error
    return failed


def _have_equal_buffers(runs: Sequence[Resolved]) -> bool:
    """Whether these runs' models agree in all values that are not trained (buffers, frozen ones).

    A common trainer has one copy of them, but a user's model may draw them from its run's seed.
    """
    first, *others = (
        {
            name: values
            for name, values in (*run.model.named_parameters(), *run.model.named_buffers())
            if name not in run.initial_arrays
        }
        for run in runs
    )
    return all(
        first.keys() == other.keys()
        and all(torch.equal(values, other[name]) for name, values in first.items())
        for other in others
    )


class _Watcher(Callback):
    """Passes a run's rows to the sweep's observer."""

    def __init__(self, run: SweepRun, observer: Observer) -> None:
        self._run = run
        self._observer = observer

    def on_round(self, status: RunStatus) -> None:
        self._observer(self._run, status.row)

"""Run the members of a sweep, and keep how each of them ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from fedsim.closing import end_on_signal
from fedsim.config import RunConfig, Scalar
from fedsim.config.plan import split_settings
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError, RunFailedError
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.checkpoints import Checkpoints, RunState
from fedsim.runs.data_split import DatasetCache, resolve_data
from fedsim.runs.directory import RunDirectory
from fedsim.runs.factories import algorithm
from fedsim.runs.metrics import Row
from fedsim.runs.preflight import check
from fedsim.runs.record import Ended, ending
from fedsim.runs.resolve import Resolved, calibrated, resolve
from fedsim.runs.session import YOURS, Session
from fedsim.runs.summary import leave_report, record_ending
from fedsim.runs.sweep.halving import Halving
from fedsim.runs.sweep.members import Member
from fedsim.runs.sweep.together import in_step
from fedsim.strategies import run_to_end

_log = logging.getLogger("fedsim")

Observer = Callable[[Member, Row], None]


@dataclass(frozen=True)
class MemberOutcome:
    """How a member ended.

    Attributes
    ----------
    ended : str
        As a run does; "dropped" where halving let others go on, "failed" for a member that could
        not go on.
    reason : str
        A sentence; empty for one that finished.
    """

    ended: Ended
    reason: str = ""


@dataclass(frozen=True)
class _Sweep:
    """Where members go, who is told of their rows, and the data sets that they share."""

    out: Path
    observer: Observer | None
    datasets: DatasetCache = field(default_factory=DatasetCache)

    def resolve(self, member: Member) -> Resolved:
        """All that a member is made of: its own, but for the data, which are read once."""
        data = resolve_data(member.config, load=self.datasets.load)
        return resolve(member.config, out=self.out / member.label, data=data)


def run_sweep(
    grid: Sequence[Member],
    out: Path,
    observer: Observer | None = None,
    halving: Halving | None = None,
) -> dict[str, MemberOutcome]:
    """Run the members that have not been run to their end in ``out``.

    A member that diverges or raises has failed, and the others go on. One that failed for a
    reason that would come again (too many rounds without a usable reply) is not tried again.

    Parameters
    ----------
    grid : sequence of Member
    out : path
        Each member's artefacts go to a directory of its own in it.
    observer : callable, optional
        Called with each row of each member.
    halving : Halving, optional
        When members are dropped; without it all go through all their rounds.

    Returns
    -------
    dict of str to MemberOutcome
        Of each member, by its label.

    Raises
    ------
    FedsimError
        If ``out`` holds a member of another sweep, or one is for another engine.
    """
    for member in grid:
        engine, client = member.config.engine.name, member.config.client
        if engine != "local":
            raise FedsimError(f"engine.name = '{engine}'; a sweep's members run on 'local'.")
        if client.state == "client" and client.state_dir:
            raise FedsimError(
                f"client.state-dir = '{client.state_dir}'; in a sweep it must be empty while "
                "client.state = 'client', or clients of a member would go on from what those of "
                "another keep there."
            )
    _check_clients_kept(grid)
    sweep = _Sweep(out, observer)
    if halving is not None:
        halving.check(grid, sweep.resolve)
    for member in grid:
        if not is_done(member, out):
            RunDirectory(out / member.label).check_free(overwrite=True)
            check(sweep.resolve(member))
    if halving is None:
        return _run_members(grid, sweep)
    return _halved(grid, sweep, halving)


def _check_clients_kept(grid: Sequence[Member]) -> None:
    """Refuse one place for the ledgers of clients that are not the same in all members."""
    private = [member.config for member in grid if member.config.client.private]
    splits = {split_settings(config) for config in private}
    shared = {config.client.state_dir for config in private} - {""}
    if len(splits) > 1 and shared:
        raise FedsimError(
            f"client.state-dir = '{min(shared)}'; in this sweep it must be empty: runs assign "
            "examples to clients differently (seed, data or partition), and one client's ledger "
            "there would be about several clients' examples."
        )


def _halved(grid: Sequence[Member], sweep: _Sweep, halving: Halving) -> dict[str, MemberOutcome]:
    """Run them from rung to rung; what is there already is looked at, not run again."""
    outcomes: dict[str, MemberOutcome] = {}
    going = list(grid)
    rungs = halving.rungs(grid[0].config.rounds)
    for rung in rungs:
        reached = _run_members(going, sweep, until=rung)
        outcomes |= reached
        if rung == rungs[-1] or not going:
            break
        rows = [
            (member, _rows_at(rung, RunDirectory(sweep.out / member.label), reached))
            for member in going
        ]
        dropped = halving.dropped(rows, rung)
        for label, why in dropped.items():
            if reached[label].ended == "interrupted":
                outcomes[label] = MemberOutcome("dropped", why)
                record_ending(RunDirectory(sweep.out / label), "dropped", why)
        going = [member for member in going if member.label not in dropped]
    return outcomes


def _rows_at(
    rung: int, directory: RunDirectory, outcomes: Mapping[str, MemberOutcome]
) -> list[Row] | None:
    """A member's rows up to a rung; None if it failed before it had come there.

    One that failed later went on then: it is compared again as it was.
    """
    rows = directory.metrics_file.rows()
    came_there = bool(rows) and rows[-1]["round"] >= rung
    if outcomes[directory.path.name].ended == "failed" and not came_there:
        return None
    return [row for row in rows if row["round"] <= rung]


def _run_members(
    grid: Sequence[Member], sweep: _Sweep, until: int | None = None
) -> dict[str, MemberOutcome]:
    """Run them to their ends, or through the round ``until``."""
    out = sweep.out
    waiting = [member for member in grid if not _has_reached(member, out, until)]
    outcomes: dict[str, MemberOutcome] = {}
    for group in _groups(waiting, out):
        outcomes |= _run_group(group, sweep, until)
    for member in grid:
        ended, why = ending(out / member.label)
        outcomes.setdefault(member.label, MemberOutcome(ended, why))
    return outcomes


def _has_reached(member: Member, out: Path, until: int | None) -> bool:
    if is_done(member, out):
        return True
    state = _reached(RunDirectory(out / member.label))
    return until is not None and state is not None and state.round >= until


def is_done(member: Member, out: Path) -> bool:
    """Whether the member has been run to its end in ``out``.

    Raises
    ------
    FedsimError
        If its directory holds a run of another config.
    """
    directory = RunDirectory(out / member.label)
    if not directory.config.exists():
        return False
    stored = RunConfig.load(directory.config)
    if _without_resolved(stored) != _without_resolved(calibrated(member.config)):
        raise FedsimError(f"{directory.path} holds a run of another config; choose another --out.")
    return directory.done.exists()


_RESOLVED = ("client.path", "client.block-size", "engine.device", "noise.entropy")


def _without_resolved(config: RunConfig) -> dict[str, Scalar]:
    return {k: v for k, v in config.to_run_config().items() if k not in _RESOLVED}


def _groups(waiting: Sequence[Member], out: Path) -> list[list[Member]]:
    """Members whose clients can share blocks, from the same round on, together."""
    groups: dict[tuple[object, ...], list[Member]] = {}
    for member in waiting:
        state = _reached(RunDirectory(out / member.label))
        first = 0 if state is None else state.round
        groups.setdefault((first, *_shared_work(member)), []).append(member)
    return list(groups.values())


def _reached(directory: RunDirectory) -> RunState | None:
    """The last checkpoint of a member, if it has one."""
    return Checkpoints(directory.checkpoint).newest() if directory.holds_run() else None


def _shared_work(member: Member) -> tuple[object, ...]:
    """What must be equal for clients to share a block: all that is not a number of their own."""
    config = member.config
    if config.client.private or config.client.state != "reset" or config.client.work:
        # Ledgers, kept state and work of their own belong to one run's clients.
        return (member.label,)
    free = {f"client.{name.replace('_', '-')}" for name in algorithm(config).numbers()}
    # Frozen parameters are the trainer's, and start from the seed.
    seed = config.seed if config.model.trainable else None
    return (
        seed,
        *(
            (key, value)
            for key, value in config.to_run_config().items()
            if key.split(".")[0] in ("data", "model", "task", "client", "engine")
            and key not in free
        ),
    )


def _run_group(
    group: Sequence[Member], sweep: _Sweep, until: int | None
) -> dict[str, MemberOutcome]:
    directories = [RunDirectory(sweep.out / member.label) for member in group]
    with ExitStack() as claims:
        sessions = []
        for member, directory in zip(group, directories, strict=True):
            resolved = sweep.resolve(member)
            text = resolved.config.to_toml()
            state = _reached(directory)
            claims.enter_context(
                directory.claim(text, overwrite=True) if state is None else directory.resumed(text)
            )
            watching = {} if sweep.observer is None else {YOURS: _Watcher(member, sweep.observer)}
            sessions.append(Session(resolved, directory, watching, resume=state, until=until))
        failed = _run_sessions(sessions)
        for index, error in failed.items():
            if isinstance(error, RunFailedError):  # and would again
                directories[index].finish("failed", str(error))
    return {
        group[index].label: MemberOutcome("failed", _reason(error))
        for index, error in failed.items()
    }


def _reason(error: Exception) -> str:
    if isinstance(error, RunFailedError | FedsimError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _run_sessions(sessions: Sequence[Session]) -> dict[int, Exception]:
    """Run them to their ends; what ended those that failed."""
    failed: dict[int, Exception] = {}
    whole = asked = False

    def end() -> None:
        nonlocal asked
        asked = True
        for session in sessions:
            session.end()

    with end_on_signal(end):
        try:
            failed = _advance(sessions)
            whole = True
        finally:
            for index, session in enumerate(sessions):
                session.finish(whole=whole and index not in failed)
    for index, session in enumerate(sessions):
        result = session.result(interrupted=session.ended == "interrupted")
        error = failed.get(index)
        if error is not None and not isinstance(error, RunFailedError):
            _log.error("a member of the sweep raised", exc_info=error)
        # Whoever asks to end asks more firmly soon after; a member that goes on has its page later.
        if not asked or error is not None or session.ended != "interrupted":
            leave_report(
                session.resolved,
                session.evaluation,
                result,
                "" if error is None else _reason(error),
            )
    if asked:
        raise KeyboardInterrupt
    return failed


def _advance(sessions: Sequence[Session]) -> dict[int, Exception]:
    runs = [(session, LocalGrid(session.resolved.trainer)) for session in sessions]
    if len(runs) == 1:
        ((session, grid),) = runs
        try:
            run_to_end(session.rounds(grid), grid, session.timeout(grid))
        except Exception as error:
            return {0: error}
        return {}
    return in_step(
        [session.rounds(grid) for session, grid in runs], [session.resolved for session in sessions]
    )


class _Watcher(Callback):
    """Tells a sweep's observer of a member's rows."""

    def __init__(self, member: Member, observer: Observer) -> None:
        self._member = member
        self._observer = observer

    def on_round(self, status: RunStatus) -> None:
        self._observer(self._member, status.row)

"""Run an experiment: its missing members, or a portion of them, then the report."""

from __future__ import annotations

import csv
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType

import torch

import experiments
from experiments.framework.base import Experiment, ExperimentMember, Report, Result, Table
from experiments.framework.directories import load
from experiments.framework.judgement import Judgement, faults
from experiments.framework.store import Store
from experiments.framework.stored import Stored, StoredResult, gathered
from fedsim import allowed_code
from fedsim.errors import FedsimError
from fedsim.federation.engines.process import use_one_thread
from fedsim.process import die_with_parent
from fedsim.reports.plots import save

_MARKER = ".fedsim-experiment"

Observer = Callable[[str, int, int], None]
"""Called with a member's name, the number of finished members, and the number of all."""


@dataclass(frozen=True)
class Portion:
    """Selection of the members to run now.

    Attributes
    ----------
    only : str
        Shell pattern that a member's name must match.
    limit : int or None
        Most members to run.
    again : bool
        Whether to run members whose results the experiment's directory already stores.
    """

    only: str = "*"
    limit: int | None = None
    again: bool = False

    def of(
        self, members: Sequence[ExperimentMember], done: Mapping[str, StoredResult], store: Store
    ) -> list[ExperimentMember]:
        """The members to run, in their order."""
        return [
            member
            for member in members
            if fnmatchcase(member.name, self.only)
            and (store.get(member) is None if self.again else member.name not in done)
        ]


@dataclass(frozen=True)
class Outcome:
    """Outcome of `run_experiment`.

    Attributes
    ----------
    report : Report or None
        None if too few members have been run for one.
    stored : Stored
        Results so far, to be saved with `Stored.save`.
    missing : int
        Number of known members that have not been run.
    judgement : Judgement or None
        The judgement in the experiment's directory; None for a quick run or another seed number.
    faults : list of str
        Reasons why the report is not valid; see `judgement.faults`.
    files : list of Path
        The tables and pictures that were written.
    quick : bool
        Whether this was the quick version.
    """

    report: Report | None
    stored: Stored
    missing: int
    judgement: Judgement | None
    faults: list[str]
    files: list[Path]
    quick: bool


def run_experiment(
    directory: Path,
    out: Path,
    *,
    data: Path = Path("data"),
    seeds: int | None = None,
    quick: bool = False,
    workers: int = 0,
    portion: Portion | None = None,
    engine: Iterable[str] = (),
    observer: Observer | None = None,
) -> Outcome:
    """Run members without results in the directory or ``out``; write tables, pictures and figures.

    Parameters
    ----------
    directory : path
        Directory with an ``experiment.toml``, and perhaps stored results; see `find`.
    out : path
        Results of members are kept in ``out/members``.
    data, seeds, quick
        As for `load`.
    workers : int
        Number of processes; 0 for one per core.
    portion : Portion, optional
        Which members to run; by default all that are missing.
    engine : iterable of str
        ``engine.KEY=VALUE``: the engine of members.
    observer : callable, optional
        Called after each member.

    Raises
    ------
    FedsimError
        If anything in the file is wrong, or ``out`` holds files that are not an experiment's.
    """
    experiment = load(directory, data=data, seeds=seeds, quick=quick, engine=engine)
    _claim(out)
    portion, tell = portion or Portion(), observer or (lambda name, done, total: None)
    store, stored = Store(out / "members"), Stored.load(directory)

    def result_of(member: ExperimentMember) -> StoredResult | None:
        return store.get(member) or stored.get(member)

    done, members = gathered(experiment, result_of)
    tell("", len(done), len(members))
    left = len(members) if portion.limit is None else portion.limit
    while work := portion.of(members, done, store)[:left]:
        experiment.prepare(out)
        for member, result, seconds in _work(experiment, work, workers, store):
            store.put(member, result, seconds)
            done[member.name] = StoredResult("", result)
            tell(member.name, len(done), len(members))
        if portion.limit is not None:
            left -= len(work)
        # New results may have made followers known: look again.
        done, members = gathered(experiment, result_of)
    missing = len(members) - len(done)
    report = None
    if done and (not missing or experiment.partial):
        report = experiment.report({name: one.result for name, one in done.items()})
    judged = (directory / "judgement.toml").is_file() and not quick and seeds is None
    judgement = Judgement.load(directory) if judged else None
    untimed = stored.untimed if any(one.seconds is None for one in done.values()) else 0.0
    return Outcome(
        report,
        Stored(done, untimed),
        missing,
        judgement,
        faults(experiment, report, judgement) if report is not None else [],
        _write(out, report) if report is not None else [],
        quick,
    )


def _claim(out: Path) -> None:
    """Mark a new or empty directory as an experiment's; refuse one with other files."""
    marker = out / _MARKER
    if marker.exists():
        return
    if out.is_dir() and any(out.iterdir()):
        raise FedsimError(
            f"--out {out} holds files and no experiment's marker ({_MARKER}), so that these may be "
            "somebody's own; choose another directory."
        )
    out.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _work(
    experiment: Experiment, missing: list[ExperimentMember], workers: int, store: Store
) -> Iterator[tuple[ExperimentMember, Result, float | None]]:
    """Run members; yields each with its result and seconds as it finishes."""
    count = min(workers or os.cpu_count() or 1, len(missing))
    if count <= 1:
        for member in missing:
            yield (member, *_timed(experiment, member, store))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, mp_context=spawn, initializer=die_with_parent, initargs=(os.getpid(),)
    ) as pool:
        try:
            yield from _as_completed(pool, partial(_in_worker, experiment, store), missing, count)
        except BrokenProcessPool:
            raise FedsimError(
                "a process of the experiment was killed, perhaps for want of memory; what has "
                "finished is kept: run it again, with --workers 1 where memory is short."
            ) from None
        except BaseException as error:
            # On Ctrl-C the terminal has signalled the workers too; any other error (a SIGTERM, a
            # failed member) is known to this process only, so it must end them.
            if type(error) is not KeyboardInterrupt:
                _end_workers()
            raise


def _end_workers() -> None:
    for worker in multiprocessing.active_children():
        assert worker.pid is not None  # it has been started
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGINT)


def _as_completed(
    pool: ProcessPoolExecutor,
    run: Callable[[ExperimentMember], tuple[Result, float | None]],
    members: list[ExperimentMember],
    count: int,
) -> Iterator[tuple[ExperimentMember, Result, float | None]]:
    """Yield members as they finish.

    Never more than ``count`` members are submitted: the pool starts every queued one, even after
    Ctrl-C.
    """
    left = iter(members)
    # The processes start here and inherit SIG_IGN: they must ignore Ctrl-C except within a member
    # (see `_in_worker`). A process that ended between members would break the pool, which then
    # terminates the others in the middle of a round, and they wait for work for ever.
    with _ctrl_c(signal.SIG_IGN):
        futures = {pool.submit(run, m): m for m in islice(left, count)}
    while futures:
        ended = wait(futures, return_when=FIRST_COMPLETED).done
        # Results before failures: if a process was killed, all pending futures fail with it, and
        # raising that first would lose the results that are already there.
        for future in sorted(ended, key=lambda each: each.exception() is not None):
            yield (futures.pop(future), *future.result())
        futures |= {pool.submit(run, m): m for m in islice(left, len(ended))}


@contextmanager
def _ctrl_c(handler: signal.Handlers | Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Replace the handler of Ctrl-C within the context."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _in_worker(
    experiment: Experiment, store: Store, member: ExperimentMember
) -> tuple[Result, float | None]:
    with _ctrl_c(signal.default_int_handler):
        return _timed(experiment, member, store)


def _timed(
    experiment: Experiment, member: ExperimentMember, store: Store
) -> tuple[Result, float | None]:
    """Run a member: its result, and the seconds of one core it took (None if it used a GPU)."""
    use_one_thread()
    allowed_code.allow([experiments.__name__])
    start = time.process_time()

    def seconds() -> float | None:
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return None if on_gpu else time.process_time() - start

    try:
        return experiment.run(member.settings), seconds()
    except BaseException as error:
        # The attempt's seconds are added to those of the attempt that resumes it.
        with suppress(OSError):
            store.interrupted(member, seconds())
        if isinstance(error, FedsimError):
            raise FedsimError(f"{member.name}: {error}") from error
        raise


def _write(out: Path, report: Report) -> list[Path]:
    files = []
    figures = Table("figures", "Figures", ["figure", "here"], list(report.figures.items()))
    for table in (*report.tables, figures):
        path = out / f"{table.name}.csv"
        _write_csv(path, table)
        files.append(path)
    for name, picture in report.pictures.items():
        path = out / f"{name}.png"
        save(picture, path)
        files.append(path)
    return files


def _write_csv(path: Path, table: Table) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table.columns)
        writer.writerows(table.rows)

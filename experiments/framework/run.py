"""Load an experiment from its directory, run its missing members, and store their results."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import torch

import experiments
from experiments.framework.base import Experiment, Members, Result, digest, read_table
from experiments.framework.config_runs import ConfigRuns
from fedsim import allowed_code, regular_files
from fedsim.config import RunConfig
from fedsim.config.release_keys import changed_keys
from fedsim.config.run_config import read_tree
from fedsim.errors import FedsimError
from fedsim.federation.engines.process import use_one_thread
from fedsim.privacy.durable import locked, replace
from fedsim.process import die_with_parent
from fedsim.synonyms import closest

DIGITS = 6
"""Significant digits of a stored number; results are judged as stored."""

MARKER = ".fedsim-experiment"
"""File that marks an ``--out``, and is locked while its results are written."""
_ROOT = Path(experiments.__file__).parent


def directories() -> dict[str, Path]:
    """Directories of this checkout's experiments, by name."""
    found = [path.parent for path in _ROOT.rglob("experiment.toml")]
    return {path.name: path for path in sorted(found, key=lambda path: path.name)}


def find(name: str) -> Path:
    """Directory of an experiment, given by name or as a path to a user's own directory.

    Raises
    ------
    FedsimError
        If there is none.
    """
    known = directories()
    if (Path(name) / "experiment.toml").is_file():
        return Path(name)
    if name not in known:
        hint = closest("experiment", name, known)
        raise FedsimError(
            f"there is no experiment '{name}';{hint} must be one of {', '.join(known)}, or "
            "a directory with an experiment.toml."
        )
    return known[name]


def load(directory: Path, *, data: Path = Path("data"), engine: Sequence[str] = ()) -> Experiment:
    """Load the experiment of a directory.

    Parameters
    ----------
    directory : path
    data : path
        Folder of data sets.
    engine : sequence of str
        ``engine.KEY=VALUE``: the engine of members that are runs of a config.

    Raises
    ------
    FedsimError
        If anything in the file is wrong, or ``engine`` has another key.
    """
    path = directory / "experiment.toml"
    tree = read_tree(path)
    allowed_code.allow([experiments.__name__])  # their configs name code of this package
    module, _, name = str(tree.get("experiment")).partition(":")
    try:
        kind: type[Experiment] = getattr(import_module(f"{experiments.__name__}.{module}"), name)
        if not issubclass(kind, Experiment):
            raise TypeError(f"{name} is no experiment")
    except (ImportError, AttributeError, TypeError) as error:
        raise FedsimError(
            f"{path}: experiment = {tree.get('experiment')!r}; it must be a module and a class of "
            f"experiments/, such as das.tables:Das ({error})."
        ) from None
    allowed = issubclass(kind, ConfigRuns) and all(key.startswith("engine.") for key in engine)
    if engine and not allowed:
        raise FedsimError(
            f"--set {engine[0]}; it must be engine.KEY=VALUE, of an experiment whose members are "
            "runs of a config: what else it is made of stands in its directory."
        )
    settings = read_table(get_type_hints(kind)["settings"], tree, str(path))
    return kind(settings, directory, data, changed_keys(RunConfig.from_overrides(engine)))


@dataclass(frozen=True)
class Stored:
    """Results of all members, or of those that have been run so far: ``results.json``.

    Attributes
    ----------
    members : mapping of str to mapping
        By the member's name: ``settings`` (their `digest`), ``result``, ``seconds`` of one core or
        ``gpu`` (seconds on the clock of a run on one), ``date``, and ``commit`` if it is known.
    seconds : float
        Total seconds of one core of members without seconds of their own.
    """

    members: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def core_seconds(self) -> float:
        """Total seconds of one core."""
        return sum((one.get("seconds", 0.0) for one in self.members.values()), self.seconds)

    @property
    def on_gpu(self) -> int:
        """Number of runs on a GPU, which have no seconds of a core."""
        return 0 if self.seconds else sum("seconds" not in one for one in self.members.values())

    @property
    def results(self) -> dict[str, Result]:
        """Results by the member's name."""
        return {name: one["result"] for name, one in self.members.items()}

    @property
    def fingerprint(self) -> str:
        """Hash of all results and their settings, in twelve digits."""
        settings = {name: one["settings"] for name, one in self.members.items()}
        content = json.dumps([self.results, settings], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @classmethod
    def load(cls, directory: Path) -> Stored:
        """Read an experiment's ``results.json``; empty if there is none.

        Raises
        ------
        FedsimError
            If the file is there and cannot be read.
        """
        path = directory / "results.json"
        try:
            stored = cls(**json.loads(regular_files.read_text(path))) if path.is_file() else cls()
            complete = all({"settings", "result"} <= one.keys() for one in stored.members.values())
            if not (complete and stored.core_seconds >= 0):
                raise ValueError("a member lacks its settings or its result")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise FedsimError(f"{path} cannot be read: {error!r}.") from None
        return stored

    def save(self, directory: Path) -> None:
        """Write the file, with one line per member."""
        lines = [
            f"  {json.dumps(name)}: {json.dumps(member, separators=(',', ':'))}"
            for name, member in sorted(self.members.items())
        ]
        text = f'{{"seconds": {round(self.seconds)}, "members": {{\n' + ",\n".join(lines) + "\n}}\n"
        replace(directory / "results.json", text.encode())

    def of(self, members: Members) -> dict[str, Mapping[str, Any]]:
        """What is stored of members, for their present settings."""
        return {
            name: self.members[name]
            for name, settings in members.items()
            if name in self.members and self.members[name]["settings"] == digest(settings)
        }


def keep(directory: Path, name: str, member: Mapping[str, Any]) -> None:
    """Add what is stored of a member to a directory, to which other processes may add theirs."""
    with locked(directory / MARKER):
        stored = Stored.load(directory)
        Stored({**stored.members, name: member}, stored.seconds).save(directory)


def gathered(experiment: Experiment, *sources: Stored) -> tuple[Stored, Members]:
    """What is stored of an experiment's members, the first source first, and all known members.

    Followers are known once the members on which they depend have been run.
    """
    members = experiment.members()
    found = ChainMap(*(source.of(members) for source in sources))
    if len(found) == len(members) or experiment.partial:
        members = members | experiment.followers(Stored(found).results)
        found = ChainMap(*(source.of(members) for source in sources))
    untimed = any("seconds" not in one and "gpu" not in one for one in found.values())
    return Stored(found, max(one.seconds for one in sources) * untimed), members


def run_members(
    experiment: Experiment, out: Path, *, workers: int = 0, only: str = "*", again: bool = False
) -> Iterator[tuple[str, int, int]]:
    """Run members without a result in the experiment's directory or ``out``.

    Parameters
    ----------
    experiment : Experiment
    out : path
        Results of members are kept in ``out/results.json``.
    workers : int
        Number of processes; 0 for one per core.
    only : str
        Shell pattern that the names of members to run match.
    again : bool
        Whether to run members whose results the experiment's directory stores.

    Yields
    ------
    name, finished, all : str, int, int
        At the start (without a name) and after each member: its name, the number of finished
        members, and that of all that are known.

    Raises
    ------
    FedsimError
        If a member is refused, or ``out`` holds files that are not an experiment's.
    """
    if out.exists() and not out.is_dir():
        raise FedsimError(f"--out {out} is a file; it must be a directory.")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()) and not (out / MARKER).exists():
        raise FedsimError(
            f"--out {out} holds files and no experiment's marker ({MARKER}), so that these may be "
            "somebody's own; choose another directory."
        )
    (out / MARKER).touch()
    stored = Stored.load(experiment.directory)
    while True:  # new results may make followers known
        finished = Stored.load(out)
        done, members = gathered(experiment, finished, stored)
        unwanted = finished.of(members) if again else done.members
        work = {
            name: settings
            for name, settings in members.items()
            if fnmatchcase(name, only) and name not in unwanted
        }
        if not work:
            return
        experiment.prepare(out)
        names = {*unwanted}
        yield "", len(names), len(members)
        for name in _work(experiment, work, workers, out):
            names.add(name)
            yield name, len(names), len(members)


def _work(experiment: Experiment, members: Members, workers: int, out: Path) -> Iterator[str]:
    """Run members, and yield the name of each as it finishes."""
    count = min(workers or os.cpu_count() or 1, len(members))
    if count == 1:
        for name, settings in members.items():
            _run(experiment, out, name, settings)
            yield name
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, mp_context=spawn, initializer=die_with_parent, initargs=(os.getpid(),)
    ) as pool:
        # Processes inherit it, from their first instruction on: Ctrl-C is the parent's to answer.
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        futures = {pool.submit(_run, experiment, out, *one): one[0] for one in members.items()}
        signal.signal(signal.SIGINT, on_interrupt)
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool:
            raise FedsimError(
                "a process of the experiment was killed, perhaps for want of memory; what has "
                "finished is kept: run it again, with --workers 1 where memory is short."
            ) from None
        except BaseException:
            # Killed, not asked to end: a run is resumed exactly from its checkpoint, and a process
            # that ended by itself would take the next member.
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.kill()
            raise


def _run(experiment: Experiment, out: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Run a member, and keep its result."""
    use_one_thread()
    allowed_code.allow([experiments.__name__])
    start, clock = time.process_time(), time.monotonic()
    try:
        result = experiment.run(settings)
    except FedsimError as error:
        raise FedsimError(f"{name}: {error}") from error
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    seconds = time.monotonic() - clock if on_gpu else time.process_time() - start
    stored = {
        "settings": digest(settings),
        "result": shortened(result),
        "gpu" if on_gpu else "seconds": round(seconds, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
    }
    keep(out, name, stored)


def shortened(result: Result) -> Any:
    """A result as it is stored: all its numbers with `DIGITS` significant digits."""
    return json.loads(
        json.dumps(result), parse_float=lambda text: float(f"{float(text):.{DIGITS}g}")
    )


@cache
def _commit() -> str:
    """The checkout's commit, with a plus sign if files differ from it; empty outside of git."""
    describe = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        done = subprocess.run(describe, cwd=_ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()

"""Load an experiment from its directory, run its missing members, and store their results."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import torch

import experiments
from experiments.framework.base import Experiment, ExperimentMember, Result, digest, read_table
from experiments.framework.config_runs import ConfigRuns
from fedsim import allowed_code, regular_files
from fedsim.config import RunConfig, Scalar
from fedsim.config.release_keys import changed_keys
from fedsim.errors import FedsimError
from fedsim.federation.engines.process import use_one_thread
from fedsim.privacy.durable import locked, replace
from fedsim.process import die_with_parent
from fedsim.synonyms import closest

DIGITS = 6
"""Significant digits of a stored number; results are judged as stored."""

_MARKER = ".fedsim-experiment"
_ROOT = Path(experiments.__file__).parent


def directories() -> dict[str, Path]:
    """Directories of this checkout's experiments, by name."""
    found = Path(experiments.__file__).parent.rglob("experiment.toml")
    return {path.parent.name: path.parent for path in sorted(found, key=lambda p: p.parent.name)}


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


def read_toml(path: Path) -> dict[str, Any]:
    """Content of a TOML file of an experiment; an error is a sentence that names the file."""
    try:
        return regular_files.read_toml(path)
    except (OSError, ValueError) as error:
        raise FedsimError(f"{path} cannot be read: {error}.") from None


def load(
    directory: Path, *, data: Path, quick: bool = False, engine: Iterable[str] = ()
) -> Experiment:
    """Load the experiment of a directory.

    Parameters
    ----------
    directory : path
    data : path
        Folder of data sets.
    quick : bool
        Apply the table ``[quick]``: a small version, to see that everything works.
    engine : iterable of str
        ``engine.KEY=VALUE``: the engine of members that are runs of a config.

    Raises
    ------
    FedsimError
        If anything in the file is wrong.
    """
    tree = read_toml(directory / "experiment.toml")
    smaller = tree.pop("quick", {})
    kind, keys = _kind(tree.get("experiment")), _engine_keys(engine)
    if keys and not issubclass(kind, ConfigRuns):
        raise FedsimError(
            f"--set {', '.join(keys)}; it must be left out: the members of {directory.name} are no "
            "runs of a config, and have no engine."
        )
    allowed_code.allow([experiments.__name__])  # their configs name code of this package
    settings = read_table(get_type_hints(kind)["settings"], tree | smaller if quick else tree)
    return kind(settings, directory, data, keys)


def _kind(name: object) -> type[Experiment]:
    module, _, attribute = str(name).partition(":")
    path = Path(experiments.__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    kind = path.is_file() and getattr(import_module(f"experiments.{module}"), attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Experiment)):
        raise FedsimError(
            f"experiment = {name!r}; it must be a module and a class of experiments/, such as "
            "das.tables:Das."
        )
    return kind


def _engine_keys(overrides: Iterable[str]) -> dict[str, Scalar]:
    """Parse ``engine.KEY=VALUE`` to the config keys that it changes."""
    for text in overrides:
        if not text.startswith("engine."):
            raise FedsimError(
                f"--set {text}; it must be engine.KEY=VALUE, which no result depends on: what an "
                "experiment is made of stands in its directory."
            )
    return changed_keys(RunConfig.from_overrides(overrides))


@dataclass(frozen=True)
class StoredResult:
    """Stored result of one member.

    Attributes
    ----------
    settings : str
        The `digest` of the member's settings.
    result : Result
    seconds : float or None
        Seconds of one core; None for a run on a GPU, or if only the total of all members is known.
    gpu : float or None
        Seconds on the clock of a run on a GPU.
    date, commit : str
        When it was run, and of which commit; empty if that is not known.
    """

    settings: str
    result: Result
    seconds: float | None = None
    gpu: float | None = None
    date: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Stored:
    """Results of all members, or of those that have been run so far: ``results.json``.

    Attributes
    ----------
    members : mapping of str to StoredResult
        Results by the member's name.
    untimed : float
        Total seconds of one core of the members without seconds of their own.
    """

    members: Mapping[str, StoredResult] = field(default_factory=dict)
    untimed: float = 0.0

    @property
    def seconds(self) -> float:
        """Total seconds of one core."""
        return self.untimed + sum(member.seconds or 0.0 for member in self.members.values())

    @property
    def on_gpu(self) -> int:
        """Number of runs on a GPU, which have no seconds of a core."""
        return 0 if self.untimed else sum(one.seconds is None for one in self.members.values())

    @property
    def private(self) -> int:
        """Number of private runs, whose ledgers were verified."""
        return sum("ledger" in member.result for member in self.members.values())

    @property
    def fingerprint(self) -> str:
        """Hash of all results and their settings, in twelve digits."""
        results = {name: member.result for name, member in self.members.items()}
        settings = {name: member.settings for name, member in self.members.items()}
        content = json.dumps([results, settings], sort_keys=True)
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
        if not path.is_file():
            return cls()
        try:
            tree = json.loads(regular_files.read_text(path))
            members = {name: StoredResult(**member) for name, member in tree["members"].items()}
            return cls(members, float(tree["seconds"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FedsimError(f"{path} cannot be read: {error!r}.") from None

    def save(self, directory: Path) -> None:
        """Write the file, with one line per member."""
        lines = []
        for name, member in sorted(self.members.items()):
            content: dict[str, Any] = {"settings": member.settings, "result": member.result}
            for key, value in vars(member).items():
                if key not in content and value not in (None, ""):
                    content[key] = round(value, 1) if isinstance(value, float) else value
            written = json.dumps(content, separators=(",", ":"))
            lines.append(f"  {json.dumps(name)}: {written}")
        text = f'{{"seconds": {round(self.untimed)}, "members": {{\n' + ",\n".join(lines) + "\n}}\n"
        replace(directory / "results.json", text.encode())

    def get(self, member: ExperimentMember) -> StoredResult | None:
        """Stored result of a member; None if there is none for its present settings."""
        stored = self.members.get(member.name)
        return stored if stored and stored.settings == digest(member.settings) else None


def shortened(value: Any) -> Any:
    """Round all numbers to `DIGITS` significant digits, in lists and mappings of any depth."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: shortened(inner) for name, inner in value.items()}
    return [shortened(inner) for inner in value] if isinstance(value, list | tuple) else value


def keep(directory: Path, member: ExperimentMember, result: StoredResult) -> None:
    """Add a member's result to those in a directory, to which other processes may add theirs."""
    with locked(directory / _MARKER):
        stored = Stored.load(directory)
        Stored({**stored.members, member.name: result}, stored.untimed).save(directory)


def gathered(
    experiment: Experiment, *stored: Stored
) -> tuple[dict[str, StoredResult], list[ExperimentMember]]:
    """Results of an experiment's members, each from the first that has it, and all known members.

    Followers are known once the members on which they depend have been run.
    """
    members = experiment.members()
    results = _found(members, stored)
    if len(results) == len(members) or experiment.partial:
        followers = experiment.followers({name: one.result for name, one in results.items()})
        members = [*members, *followers]
        results |= _found(followers, stored)
    return results, members


def _found(
    members: Sequence[ExperimentMember], stored: Sequence[Stored]
) -> dict[str, StoredResult]:
    return {
        member.name: of_member[0]
        for member in members
        if (of_member := [result for one in stored if (result := one.get(member)) is not None])
    }


def run_members(
    experiment: Experiment,
    out: Path,
    *,
    workers: int = 0,
    only: str = "*",
    again: bool = False,
    observer: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Stored:
    """Run members without a result in the experiment's directory or ``out``; returns all results.

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
    observer : callable
        Called with a member's name, the number of finished members and that of all: at the start
        (without a name), and after each member.

    Raises
    ------
    FedsimError
        If a member is refused, or ``out`` holds files that are not an experiment's.
    """
    _claim(out)
    finished, stored = Stored.load(out), Stored.load(experiment.directory)
    done, members = gathered(experiment, finished, stored)
    observer("", len(done), len(members))
    while work := [
        member
        for member in members
        if fnmatchcase(member.name, only)
        and (finished if again else Stored(done)).get(member) is None
    ]:
        experiment.prepare(out)
        names = set(done)
        for member in _work(experiment, work, workers, out):
            names.add(member.name)
            observer(member.name, len(names), len(members))
        # New results may have made followers known: look again.
        finished = Stored.load(out)
        done, members = gathered(experiment, finished, stored)
    return Stored(done, stored.untimed if any(one.seconds is None for one in done.values()) else 0)


def _claim(out: Path) -> None:
    """Mark a new or empty directory as an experiment's; refuse one with other files."""
    if out.exists() and not out.is_dir():
        raise FedsimError(f"--out {out} is a file; it must be a directory.")
    if out.is_dir() and any(out.iterdir()) and not (out / _MARKER).exists():
        raise FedsimError(
            f"--out {out} holds files and no experiment's marker ({_MARKER}), so that these may be "
            "somebody's own; choose another directory."
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARKER).touch()


def _work(
    experiment: Experiment, members: list[ExperimentMember], workers: int, out: Path
) -> Iterator[ExperimentMember]:
    """Run members, and yield each as it finishes."""
    count = min(workers or os.cpu_count() or 1, len(members))
    if count == 1:
        for member in members:
            _run(experiment, out, member)
            yield member
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, mp_context=spawn, initializer=die_with_parent, initargs=(os.getpid(),)
    ) as pool:
        # Processes inherit it, from their first instruction on: Ctrl-C is the parent's to answer.
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        futures = {pool.submit(_run, experiment, out, member): member for member in members}
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


def _run(experiment: Experiment, out: Path, member: ExperimentMember) -> None:
    """Run a member, and keep its result."""
    use_one_thread()
    allowed_code.allow([experiments.__name__])
    start, clock = time.process_time(), time.monotonic()
    try:
        result = experiment.run(member.settings)
    except FedsimError as error:
        raise FedsimError(f"{member.name}: {error}") from error
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    times = (
        {"gpu": time.monotonic() - clock} if on_gpu else {"seconds": time.process_time() - start}
    )
    today = datetime.now(UTC).date().isoformat()
    digested, short = digest(member.settings), shortened(result)
    keep(out, member, StoredResult(digested, short, **times, date=today, commit=_commit()))


@cache
def _commit() -> str:
    """The checkout's commit, with a plus sign if files differ from it; empty outside of git."""
    try:
        of = partial(subprocess.run, cwd=_ROOT, check=True, capture_output=True, text=True)
        head = of(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        changed = of(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + "+" * bool(changed)

"""Run an experiment: the members that are missing, then the report and its files.

`check` judges stored results again, and `keep` writes the page and pictures of them.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import experiments
from experiments.framework.base import Context, Experiment, ExperimentMember, Report, Result, Table
from experiments.framework.judgement import Judgement, faults
from experiments.framework.pages import readme
from experiments.framework.store import Store
from experiments.framework.stored import Stored, digest
from fedsim import allowed_code, regular_files
from fedsim.errors import FedsimError
from fedsim.federation.engines.process import use_one_thread
from fedsim.reports.plots import save

__all__ = [
    "KINDS",
    "Checked",
    "Observer",
    "Outcome",
    "check",
    "find",
    "keep",
    "load",
    "names",
    "run_experiment",
]

KINDS = {
    "quadratic": "experiments.das.quadratic:Quadratic",
    "das": "experiments.das.tables:Das",
    "das-local-steps": "experiments.das.local_steps:LocalSteps",
    "adaclip-regression": "experiments.adaclip.regression:Regression",
    "adaclip-mnist": "experiments.adaclip.mnist:Mnist",
    "adaclip-whitening": "experiments.adaclip.whitening:Whitening",
    "adaclip-pca": "experiments.adaclip.pca:Pca",
    "xu": "experiments.xu.xu:Xu",
    "comparison": "experiments.comparisons.comparison:Comparison",
    "plans": "experiments.plans.plans:Plans",
    "niid": "experiments.niid.niid:Niid",
    "koskela-federated": "experiments.koskela.federated:KoskelaFederated",
    "koskela-private": "experiments.koskela.private:KoskelaPrivate",
    "koskela-rate": "experiments.koskela.rate:KoskelaRate",
    "koskela-scale": "experiments.koskela.scale:KoskelaScale",
}
"""Values of the key ``experiment``, and the class behind each."""

_MARKER = ".fedsim-experiment"

Observer = Callable[[str, int, int], None]
"""Called with a member's name, how many are done, and how many there are."""


@dataclass(frozen=True)
class Outcome:
    """A report, where its files are, and why it cannot stand where it cannot.

    Attributes
    ----------
    stored : Stored
        Results of all members, as `keep` writes them.
    judgement : Judgement or None
        What the experiment's directory says of it.
    faults : list of str
        See `judgement.faults`.
    """

    report: Report
    stored: Stored
    judgement: Judgement | None
    faults: list[str]
    files: list[Path]
    quick: bool


@dataclass(frozen=True)
class Checked:
    """What stored results say now.

    Attributes
    ----------
    report : Report or None
        None where nothing is stored.
    faults : list of str
        Sentences; none where results, judgement and page agree.
    page : str
        README.md as it should be.
    not_run : str
        Why nothing is stored and what it would take, where that is so.
    """

    report: Report | None
    faults: list[str]
    page: str
    not_run: str = ""


def find(name: str) -> Path:
    """Directory of an experiment: a name, or a path to a directory of the user's own.

    Raises
    ------
    FedsimError
        If there is none.
    """
    known = _directories()
    directory = Path(name)
    if (directory / "experiment.toml").is_file():
        return directory
    if name not in known:
        raise FedsimError(
            f"there is no experiment '{name}'; it must be one of {', '.join(sorted(known))}, or a "
            "directory with an experiment.toml."
        )
    return known[name]


def names() -> list[str]:
    """Experiments of this checkout."""
    return sorted(_directories())


def _directories() -> dict[str, Path]:
    root = Path(experiments.__file__).parent
    return {path.parent.name: path.parent for path in root.rglob("experiment.toml")}


def load(
    directory: Path, *, data: Path, seeds: int | None = None, quick: bool = False
) -> Experiment:
    """The experiment that a directory describes.

    Parameters
    ----------
    data : path
        Where data sets are kept.
    seeds : int, optional
        Instead of the file's own.
    quick : bool
        Apply the table ``[quick]``: a small version, to see that everything works.

    Raises
    ------
    FedsimError
        If anything in the file is wrong.
    """
    path = directory / "experiment.toml"
    try:
        tree = tomllib.loads(regular_files.read_text(path))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedsimError(f"{path} cannot be read: {error}.") from None
    smaller = tree.pop("quick", {})
    if quick:
        tree |= smaller
    if seeds is not None:
        tree["seeds"] = seeds
    return _make(tree, Context(directory, data))


def _make(tree: dict[str, Any], context: Context) -> Experiment:
    key = tree.get("experiment")
    if key not in KINDS:
        raise FedsimError(f"experiment = {key!r}; it must be one of {', '.join(KINDS)}.")
    module, _, name = KINDS[key].partition(":")
    experiment: type[Experiment] = getattr(import_module(module), name)
    allowed_code.allow([experiments.__name__])  # what their configs name is theirs
    return experiment(experiment.settings_type.read(tree), context)


def run_experiment(
    directory: Path,
    out: Path,
    *,
    data: Path = Path("data"),
    seeds: int | None = None,
    quick: bool = False,
    workers: int = 0,
    observer: Observer | None = None,
) -> Outcome:
    """Run what is missing and write the tables, pictures and figures.

    Parameters
    ----------
    directory : path
        With an ``experiment.toml``; see `find`.
    out : path
        Results of members are kept in ``out/members``.
    workers : int
        Processes; 0 is one a core.
    observer : callable, optional

    Raises
    ------
    FedsimError
        If anything in the file is wrong, or ``out`` holds what no experiment has left.
    """
    experiment = load(directory, data=data, seeds=seeds, quick=quick)
    _claim(out)
    store, tell = Store(out / "members"), observer or (lambda name, done, total: None)
    members = experiment.members()
    results = _complete(experiment, members, store, out, workers, tell)
    if followers := experiment.followers(results):
        results |= _complete(experiment, followers, store, out, workers, tell)
        members = [*members, *followers]
    report = experiment.report(results)
    judged = (directory / "judgement.toml").is_file() and not quick and seeds is None
    judgement = Judgement.load(directory) if judged else None
    stored = Stored(
        results,
        {member.name: digest(member.settings) for member in members},
        sum(store.seconds(member) for member in members),
    )
    return Outcome(
        report, stored, judgement, faults(experiment, report, judgement), _write(out, report), quick
    )


def check(directory: Path, *, data: Path = Path("data")) -> Checked:
    """Judge the results that are stored in an experiment's directory; nothing is computed again.

    Raises
    ------
    FedsimError
        If a file cannot be read.
    """
    checked = _judged(directory, data)
    page, written = directory / "README.md", None
    if page.is_file():
        written = regular_files.read_text(page)
    wrong = list(checked.faults)
    if written != checked.page:
        wrong.append(f"{page} is not what results and judgement say; --store writes it.")
    pictures = set(checked.report.pictures) if checked.report else set()
    for name in sorted(pictures ^ {path.stem for path in directory.glob("*.png")}):
        word = "missing" if name in pictures else "of no figure here"
        wrong.append(f"{directory / name}.png is {word}; --store writes the pictures.")
    return replace(checked, faults=wrong)


def _judged(directory: Path, data: Path) -> Checked:
    """What stored results and judgement say, whatever page and pictures there are."""
    experiment, judgement = load(directory, data=data), Judgement.load(directory)
    seeds = experiment.settings.seeds
    unrun = readme(directory.name, judgement, None, None, seeds=seeds)
    stored = Stored.load(directory)
    if stored is None:
        wrong = [] if judgement.not_run else ["there are no results, and not-run does not say why."]
        return Checked(None, wrong, unrun, judgement.not_run)
    results, missing = stored.of(experiment)
    if missing:
        wrong = [f"{len(missing)} results are missing or of other settings, such as {missing[0]}."]
        return Checked(None, wrong, unrun)
    over = sorted(stored.results.keys() - results.keys())
    wrong = [f"{len(over)} results are of no member, such as {over[0]}."] if over else []
    report = experiment.report(results)
    page = readme(directory.name, judgement, stored, report, seeds=seeds)
    return Checked(report, wrong + faults(experiment, report, judgement), page)


def keep(directory: Path) -> None:
    """Write README.md and the pictures of an experiment from what its directory stores."""
    checked = _judged(directory, Path("data"))
    (directory / "README.md").write_text(checked.page, encoding="utf-8")
    for old in directory.glob("*.png"):
        old.unlink()
    for name, picture in (checked.report.pictures if checked.report else {}).items():
        save(picture, directory / f"{name}.png")


def _complete(
    experiment: Experiment,
    members: list[ExperimentMember],
    store: Store,
    out: Path,
    workers: int,
    tell: Observer,
) -> dict[str, Result]:
    """Results of members, in their order: those there are, then those that are missing."""
    results = {m.name: stored for m in members if (stored := store.get(m)) is not None}
    missing = [member for member in members if member.name not in results]
    tell("", len(results), len(members))
    if missing:
        experiment.prepare(out)
    for member, result, seconds in _work(experiment, missing, workers):
        store.put(member, result, seconds)
        results[member.name] = result
        tell(member.name, len(results), len(members))
    return {member.name: results[member.name] for member in members}


def _claim(out: Path) -> None:
    """Mark a new or empty directory as an experiment's; refuse one that is somebody's own."""
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
    experiment: Experiment, missing: list[ExperimentMember], workers: int
) -> Iterator[tuple[ExperimentMember, Result, float]]:
    """Members as they finish."""
    count = min(workers or os.cpu_count() or 1, len(missing))
    if count <= 1:
        for member in missing:
            yield (member, *_timed(experiment, member))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=spawn) as pool:
        futures = {pool.submit(_timed, experiment, member): member for member in missing}
        try:
            for future in as_completed(futures):
                yield (futures[future], *future.result())
        except BrokenProcessPool:
            raise FedsimError(
                "a process of the experiment was killed, perhaps for want of memory; what has "
                "finished is kept: run it again, with --workers 1 where memory is short."
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _timed(experiment: Experiment, member: ExperimentMember) -> tuple[Result, float]:
    use_one_thread()
    allowed_code.allow([experiments.__name__])
    start = time.perf_counter()
    return experiment.run(member.settings), time.perf_counter() - start


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

"""Judge an experiment's stored results again, and write its page and pictures from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from experiments.framework.base import ExperimentMember, Report
from experiments.framework.directories import load
from experiments.framework.judgement import Judgement, faults
from experiments.framework.pages import Missing, MissingRuns, readme, unrun
from experiments.framework.stored import Stored, gathered
from fedsim import regular_files
from fedsim.reports.plots import save


@dataclass(frozen=True)
class Checked:
    """Evaluation of the stored results.

    Attributes
    ----------
    report : Report or None
        None if too few results are stored for one.
    faults : list of str
        Sentences; empty if results, judgement and page agree.
    page : str
        README.md as it should be.
    unrun : MissingRuns or None
        The missing runs; None if none is missing.
    """

    report: Report | None
    faults: list[str]
    page: str
    unrun: MissingRuns | None = None


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


def keep(directory: Path) -> None:
    """Write README.md and the pictures of an experiment from what its directory stores."""
    checked = _judged(directory, Path("data"))
    (directory / "README.md").write_text(checked.page, encoding="utf-8")
    for old in directory.glob("*.png"):
        old.unlink()
    for name, picture in (checked.report.pictures if checked.report else {}).items():
        save(picture, directory / f"{name}.png")


def _judged(directory: Path, data: Path) -> Checked:
    """Check stored results against the judgement; the page and pictures are not looked at."""
    experiment, judgement = load(directory, data=data), Judgement.load(directory)
    everything = Stored.load(directory)
    results, members = gathered(experiment, everything.get)
    stored, missing = (
        Stored(results, everything.untimed),
        [m for m in members if m.name not in results],
    )
    wrong = []
    if over := sorted(everything.members.keys() - results.keys()):
        wrong.append(f"{len(over)} results are of no member's settings, such as {over[0]}.")
    if missing and not judgement.not_run:
        wrong.append(
            f"{len(missing)} results are missing, such as {missing[0].name}, and not-run does not "
            "say why."
        )
    if judgement.not_run and not missing:
        wrong.append("not-run says why runs are missing, and none is.")
    report = None
    if results and (not missing or experiment.partial):
        report = experiment.report({name: one.result for name, one in results.items()})
        wrong += faults(experiment, report, judgement)
    hours = [Missing(member, _seconds(member, members, stored, judgement)) for member in missing]
    more = experiment.has_followers and any(one in missing for one in experiment.members())
    left = unrun(judgement, hours, len(members), more=more) if missing else None
    page = readme(
        directory.name,
        judgement,
        stored,
        report,
        seeds=experiment.settings.seeds,
        missing=left.markdown(directory.name) if left else "",
    )
    return Checked(report, wrong, page, left)


def _seconds(
    member: ExperimentMember,
    members: Sequence[ExperimentMember],
    stored: Stored,
    judgement: Judgement,
) -> float | None:
    """Expected seconds of a run: the mean of its cell's or of all runs, or judgement.toml's."""
    alike = [other.name for other in members if other.cell == member.cell]
    times = [
        seconds
        for name in alike
        if name in stored.members and (seconds := stored.members[name].seconds) is not None
    ]
    if times:
        return fmean(times)
    return stored.mean_seconds or judgement.run_seconds or None

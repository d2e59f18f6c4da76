"""Judge an experiment's results, and write its page and pictures from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import experiments
from experiments.framework.base import (
    FLAT,
    NOT_EMPTY,
    Experiment,
    ExperimentClaim,
    Members,
    Report,
    Row,
    read_table,
)
from experiments.framework.run import Stored, directories, gathered, load
from fedsim import regular_files
from fedsim.arguments import quoted_alternatives
from fedsim.config.run_config import read_tree
from fedsim.reports.plots import save
from fedsim.settings import Constraint

MIN_SEEDS = 3
TEXTS = read_tree(Path(experiments.__file__).parent / "pages.toml")
NOT_MEASURED: str = TEXTS["not-measured"]
PAPERS: dict[str, str] = TEXTS["papers"]
"""What each group of experiments is about, in the overview's order."""
CAUSES: dict[str, str] = {"": "", **TEXTS["causes"]}
"""What a claim that is not reproduced is put down to."""

WORDS = {
    True: ("reproduced", "confirmed"),
    False: ("not reproduced", "not confirmed"),
    None: ("not decided", "not decided"),
}
"""Verdicts on a claim of the paper, and on one of ours."""

_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)

NOTHING = Report((), {}, ())
"""The report of too few results."""

_PLACE = re.compile(r"\{(.+?)(?::([^:{}]+))?\}")


def _word(words: Collection[str]) -> Constraint:
    return Constraint(words.__contains__, quoted_alternatives(tuple(words)))


@dataclass(frozen=True)
class Panel:
    """One figure or table of a paper.

    Attributes
    ----------
    name : str
        Its name in the paper, such as "Fig. 2".
    shows : str
        What the paper shows there and says about it.
    setting : str
        The setting here, and how it differs from the paper's.
    pictures, tables : list of str
        Names of the report's pictures and tables that belong to it.
    """

    name: str
    shows: str
    setting: str
    pictures: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Claimed:
    """Whose a claim is, and how it was judged.

    Attributes
    ----------
    verdict : str
        One of `WORDS`.
    source : str
        Where the paper makes the claim: its section, figure or table, and what it says there in our
        words. Without it the claim is ours.
    cause : str
        Why a claim is not reproduced or not decided, unless its readings differ, which is a cause.
        Conjectures, which no run here shows: "setting" (the setting here), "scale" (the smaller
        scale here), "printed" (the algorithm as printed). Facts: "seeds" (the spread over seeds),
        "paper" (a calculation shows that the cause is in the paper), "unrun" (runs are missing).
    why : str
        An explanation in words.
    """

    verdict: Annotated[str, _word([word for both in WORDS.values() for word in both])]
    source: str = ""
    cause: Annotated[str, _word(CAUSES)] = ""
    why: str = ""

    @property
    def words(self) -> dict[bool | None, str]:
        """Verdicts in words: the paper's claims are reproduced, ours are confirmed."""
        return {verdict: both[not self.source] for verdict, both in WORDS.items()}


@dataclass(frozen=True)
class Judgement:
    """``judgement.toml``: text, verdicts, and the numbers that a paper prints.

    In all sentences but those on the paper (``shows``), ``{name}`` or ``{name:.2f}`` is replaced
    by a figure of the report, and ``{seeds}`` by the number of seeds, so that no sentence
    contradicts the results.

    Attributes
    ----------
    about : str
        What is run, and how; a paragraph of Markdown.
    not_run : str
        Why runs are missing; empty if none is.
    remarks : list of str
    panels : list of Panel
    claims : mapping of str to Claimed
        Judgements by the claim's name.
    paper : mapping of str to float
        Figures printed in the paper, by the name of the report's figure.
    """

    title: str
    paper_of: Annotated[str, _word(PAPERS)]
    about: str
    panels: Annotated[list[Panel], NOT_EMPTY]
    not_run: str = ""
    remarks: list[str] = field(default_factory=list)
    claims: dict[str, Claimed] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Judgement:
        """Read an experiment's ``judgement.toml``.

        Raises
        ------
        FedsimError
            If it is missing, cannot be read, or has other keys.
        """
        path = directory / "judgement.toml"
        return read_table(cls, read_tree(path), str(path))


@dataclass(frozen=True)
class Judged:
    """An experiment's results, what they say, and its page.

    Attributes
    ----------
    experiment : Experiment
    judgement : Judgement
    stored : Stored
        Results of known members.
    members : mapping
        Settings of the known members, by name.
    report : Report
        Empty if there are too few results for one.
    """

    experiment: Experiment
    judgement: Judgement
    stored: Stored
    members: Members
    report: Report

    @cached_property
    def missing(self) -> list[str]:
        """Known members without a result."""
        return [name for name in self.members if name not in self.stored.members]

    def faults(self) -> Iterator[str]:
        """Reasons why the report is not valid, as sentences; none if it is.

        These are: missing runs without a reason, a best value at its grid's edge, a verdict from
        too few seeds, claims with another verdict than the judgement's or without a cause, and
        names that do not exist.
        """
        report, reason = self.report, self.judgement.not_run
        if bool(self.missing) is not bool(reason):
            some = f"such as {self.missing[0]}" if self.missing else "none"
            yield f"{len(self.missing)} results are missing, {some}, and not-run says {reason!r}."
        if report is NOTHING:
            return
        if (seeds := self.experiment.settings.seeds) < MIN_SEEDS:
            yield f"seeds = {seeds}; a verdict needs {MIN_SEEDS} or more."
        for choice in report.choices:
            if choice.at_edge:
                grid = ", ".join(f"{value:g}" for value in sorted(choice.scores))
                yield (
                    f"{choice.of}: the best of {grid} is {choice.value:g}, at the grid's edge; the "
                    "grid must go on beyond it."
                )
        for where, names, known in self._names():
            yield from (f"{where}: there is no {name!r}." for name in names if name not in known)
        for claim in report.claims:
            claimed, verdict = self.claimed(claim), self.word(claim)
            if verdict != claimed.verdict:
                yield (
                    f"claims.{claim.name} is judged '{claimed.verdict}' and came out "
                    f"'{verdict}': {claim.measured}."
                )
            if (claim.reproduced is True or claim.turns) == bool(claimed.cause):
                yield (
                    f"claims.{claim.name}.cause is {claimed.cause!r}; it says what a claim that is "
                    "not reproduced, or not decided, is put down to, and only there; where "
                    "readings differ that is the cause."
                )

    def _names(self) -> Iterator[tuple[str, Collection[str], Collection[str]]]:
        """Names, by where they are, and those that there are."""
        judgement, report = self.judgement, self.report
        claims = [claim.name for claim in report.claims]
        yield "claims of judgement.toml", judgement.claims, claims
        yield "claims of the report", claims, judgement.claims
        panels = [panel.name for panel in judgement.panels]
        yield "panels of claims", [claim.panel for claim in report.claims], panels
        yield "paper", judgement.paper, report.figures
        yield "sentences", [place[1] for place in _PLACE.finditer(self.page)], []
        for panel in judgement.panels:
            yield f"{panel.name}: pictures", panel.pictures, report.pictures
            yield f"{panel.name}: tables", panel.tables, [table.name for table in report.tables]

    def faults_of_page(self) -> Iterator[str]:
        """Differences of what its directory has, results and page, from what was judged."""
        directory = self.experiment.directory
        if over := sorted(Stored.load(directory).members.keys() - self.stored.members.keys()):
            yield f"{len(over)} results are of no member's settings, such as {over[0]}."
        page = directory / "README.md"
        if not page.is_file() or regular_files.read_text(page) != self.page:
            yield f"{page} is not what results and judgement say; --store writes it."
        pictures = {path.stem for path in directory.glob("*.png")}
        if wrong := sorted(pictures ^ self.report.pictures.keys()):
            yield f"{directory / wrong[0]}.png is missing, or of no figure; --store writes them."

    def claimed(self, claim: ExperimentClaim) -> Claimed:
        """What the judgement says of a claim; one that it does not name is ours."""
        return self.judgement.claims.get(claim.name, Claimed("not decided"))

    def word(self, claim: ExperimentClaim) -> str:
        """A claim's verdict in words: the paper's claims are reproduced, ours are confirmed."""
        return self.claimed(claim).words[claim.reproduced]

    def cause(self, claim: ExperimentClaim) -> str:
        """What a claim that is not reproduced, or not decided, is put down to, in words."""
        return f"it turns with {claim.open}" if claim.turns else CAUSES[self.claimed(claim).cause]

    def counts(self, panel: str = "") -> list[str]:
        """How many claims have which verdict, of one panel or all: the paper's, and ours."""
        texts = []
        for ours, words in enumerate(zip(*WORDS.values(), strict=True)):
            counted = Counter(
                self.word(claim)
                for claim in self.report.claims
                if panel in ("", claim.panel) and bool(ours) is not bool(self.claimed(claim).source)
            )
            texts.append(", ".join(f"{counted[word]} {word}" for word in words if counted[word]))
        return texts

    @property
    def totals(self) -> str:
        """How many claims have which verdict, as a sentence; without results it says so."""
        paper, ours = (count or "none" for count in self.counts())
        measured = f"Claims of the paper: {paper}. Ours: {ours}."
        return NOT_MEASURED if self.report is NOTHING else measured

    @property
    def verdicts(self) -> list[str]:
        """Every claim's verdict and what was measured, and at the end how many there are."""
        lines = [
            f"{self.word(claim):15} {claim.panel}: {claim.says}: {claim.measured}"
            for claim in self.report.claims
        ]
        return [*lines, self.totals, *[self.unrun] * bool(self.missing)]

    @property
    def unrun(self) -> str:
        """Why runs are missing, how many, and the hours that they would take."""
        missing, stored = len(self.missing), self.stored
        text = f"{missing:,} of {len(self.members):,} runs are missing"
        if on_cores := len(stored.members) - stored.on_gpu:
            hours = _duration(missing * stored.core_seconds / on_cores)
            text += f": an estimated {hours} of one core"
        return f"{self.judgement.not_run.strip()} {text}.".strip()

    def filled(self, sentence: str) -> str:
        """Insert figures into a sentence; places that name no figure are left unchanged."""
        figures = {"seeds": self.experiment.settings.seeds, **self.report.figures}
        return _PLACE.sub(
            lambda p: format(figures[p[1]], p[2] or "g") if p[1] in figures else p[0], sentence
        )

    @cached_property
    def page(self) -> str:
        """README.md of the experiment, from ``page.md.j2``; it says so if there are no results."""
        here = self.report.figures
        text = _PAGES.get_template("page.md.j2").render(
            judged=self,
            judgement=self.judgement,
            stored=self.stored,
            report=self.report,
            measured=self.report is not NOTHING,
            printed=[[name, says, here.get(name)] for name, says in self.judgement.paper.items()],
            papers=PAPERS,
            flat=f"{FLAT:g}",
            markdown_table=markdown_table,
            duration=_duration,
        )
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    def write(self, directory: Path) -> None:
        """Write README.md and the pictures into a directory, and remove other pictures."""
        (directory / "README.md").write_text(self.page, encoding="utf-8")
        for old in directory.glob("*.png"):
            old.unlink()
        for name, picture in self.report.pictures.items():
            save(picture, directory / f"{name}.png")


def judge(experiment: Experiment, *sources: Stored) -> Judged:
    """Judge an experiment's results, each from the first source that has it.

    Raises
    ------
    FedsimError
        If its ``judgement.toml`` cannot be read.
    """
    stored, members = gathered(experiment, *sources)
    enough = stored.members and (len(stored.members) == len(members) or experiment.partial)
    report = experiment.report(stored.results) if enough else NOTHING
    return Judged(experiment, Judgement.load(experiment.directory), stored, members, report)


def overview() -> str:
    """One page with every figure and table of the papers, next to what each paper says.

    In Markdown; pictures are linked below ``pictures/``.
    """
    root, blocks = Path(experiments.__file__).parent, [TEXTS["introduction"].strip()]
    everything = [judge(load(path), Stored.load(path)) for path in directories().values()]
    columns = ["panel", "experiment", "seeds", "the paper's claims", "ours", "cause"]
    for key, title in PAPERS.items():
        of_paper = [one for one in everything if one.judgement.paper_of == key]
        rows = [_summary(one, panel.name) for one in of_paper for panel in one.judgement.panels]
        blocks += [f"## {title}", markdown_table(columns, rows)]
        for one in of_paper:
            pictures = f"pictures/{one.experiment.directory.relative_to(root).as_posix()}/"
            page = re.sub(r"^#", "###", one.page.strip(), flags=re.MULTILINE)
            blocks.append(re.sub(r"\]\((?=[\w-]+\.png\))", f"]({pictures}", page))
    return "\n\n".join(blocks) + "\n"


def _summary(judged: Judged, panel: str) -> Row:
    """A panel's row in the overview: how many of its claims have which verdict, and why."""
    row = [panel, f"`{judged.experiment.directory.name}`"]
    if judged.report is NOTHING:
        return [*row, "", "not measured", "", ""]
    causes = dict.fromkeys(
        judged.cause(claim)
        for claim in judged.report.claims
        if claim.panel == panel and claim.reproduced is not True
    )
    return [*row, judged.experiment.settings.seeds, *judged.counts(panel), "; ".join(causes)]


def markdown_table(columns: Sequence[str], rows: Sequence[Row], digits: int = 2) -> str:
    """A Markdown table, with numbers rounded to ``digits``."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[_cell(value, digits) for value in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _cell(value: str | float | None, digits: int) -> str:
    if isinstance(value, float):
        small = 0 < abs(value) < 10 ** (1 - digits)
        return f"{value:.{digits}g}" if small else f"{value:,.{digits}f}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} seconds"
    minutes = seconds / 60
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"

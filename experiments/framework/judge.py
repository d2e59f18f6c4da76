"""Judge an experiment's results, and write its page and pictures from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

import experiments
from experiments.framework.base import (
    FLAT,
    NOT_EMPTY,
    Experiment,
    ExperimentClaim,
    ExperimentMember,
    Report,
    Row,
    read_table,
)
from experiments.framework.run import Stored, directories, gathered, load, read_toml
from fedsim import regular_files
from fedsim.arguments import quoted_alternatives
from fedsim.reports.plots import save
from fedsim.settings import Constraint

MIN_SEEDS = 3
TEXTS = read_toml(Path(experiments.__file__).parent / "pages.toml")
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

    def word(self, reproduced: bool | None) -> str:
        """The verdict in words: the paper's claims are reproduced, ours are confirmed."""
        return WORDS[reproduced][not self.source]


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
        return read_table(cls, read_toml(path), f"{path}: ")

    def sentences(self) -> Iterator[str]:
        """The sentences in which figures may be inserted."""
        yield from (self.about, *self.remarks)
        yield from (panel.setting for panel in self.panels)
        yield from (claimed.why for claimed in self.claims.values())


@dataclass(frozen=True)
class Judged:
    """An experiment's results, what they say, and its page.

    Attributes
    ----------
    experiment : Experiment
    judgement : Judgement
    stored : Stored
        Results of known members.
    members : list of ExperimentMember
        The known members.
    report : Report or None
        None if there are too few results for one.
    """

    experiment: Experiment
    judgement: Judgement
    stored: Stored
    members: list[ExperimentMember]
    report: Report | None

    @cached_property
    def missing(self) -> list[ExperimentMember]:
        """Known members without a result."""
        return [member for member in self.members if member.name not in self.stored.members]

    @cached_property
    def faults(self) -> list[str]:
        """Reasons why the report is not valid, as sentences; empty if it is.

        These are: missing runs without a reason, a best value at its grid's edge, a verdict from
        too few seeds, claims with another verdict than the judgement's or without a cause, and
        names that do not exist.
        """
        return [*self._faults()]

    def _faults(self) -> Iterator[str]:
        judgement, report, seeds = self.judgement, self.report, self.experiment.settings.seeds
        if self.missing and not judgement.not_run:
            yield (
                f"{len(self.missing)} results are missing, such as {self.missing[0].name}, and "
                "not-run does not say why."
            )
        if judgement.not_run and not self.missing:
            yield "not-run says why runs are missing, and none is."
        if report is None:
            return
        for choice in report.choices:
            if choice.at_edge:
                grid = ", ".join(f"{value:g}" for value in sorted(choice.scores))
                yield (
                    f"{choice.of}: the best of {grid} is {choice.value:g}, at the grid's edge; the "
                    "grid must go on beyond it."
                )
        if seeds < MIN_SEEDS:
            yield f"seeds = {seeds}; a verdict needs {MIN_SEEDS} or more."
        for what, named, known in self._names(report):
            yield from (
                f"{what}: there is no {name!r} in the report."
                for name in named
                if name not in known
            )
        for claim in report.claims:
            yield from self._claim_faults(claim)

    def _names(self, report: Report) -> Iterator[tuple[str, Collection[str], Collection[str]]]:
        """Names in the judgement, by where they are, and those that the report has."""
        judgement = self.judgement
        yield "claims", judgement.claims, [claim.name for claim in report.claims]
        yield "paper", judgement.paper, report.figures
        places = [place[1] for text in judgement.sentences() for place in _PLACE.finditer(text)]
        yield "sentences", places, self._figures
        for panel in judgement.panels:
            yield f"{panel.name}: pictures", panel.pictures, report.pictures
            yield f"{panel.name}: tables", panel.tables, [table.name for table in report.tables]

    def _claim_faults(self, claim: ExperimentClaim) -> Iterator[str]:
        if (claimed := self.judgement.claims.get(claim.name)) is None:
            yield f"claims.{claim.name} is missing."
            return
        if (verdict := claimed.word(claim.reproduced)) != claimed.verdict:
            yield (
                f"claims.{claim.name} is judged '{claimed.verdict}' and came out "
                f"'{verdict}': {claim.measured}."
            )
        if (claim.reproduced is True or claim.turns) == bool(claimed.cause):
            yield (
                f"claims.{claim.name}.cause is {claimed.cause!r}; it says what a claim that is not "
                "reproduced, or not decided, is put down to, and only there; where readings differ "
                "that is the cause."
            )
        if claim.panel not in [panel.name for panel in self.judgement.panels]:
            yield f"claims.{claim.name} is about {claim.panel!r}, which is no panel."

    def claimed(self, claim: ExperimentClaim) -> Claimed:
        """What the judgement says of a claim; one that it does not name is ours."""
        return self.judgement.claims.get(claim.name, Claimed("not decided"))

    def cause(self, claim: ExperimentClaim) -> str:
        """What a claim that is not reproduced, or not decided, is put down to, in words."""
        if claim.turns:
            return f"it turns with {claim.open}"
        return CAUSES[self.claimed(claim).cause]

    def counts(self, panel: Panel | None = None) -> tuple[str, str]:
        """How many claims have which verdict, of one panel or all: the paper's, and ours."""
        claims = [
            claim
            for claim in (self.report.claims if self.report else ())
            if panel is None or claim.panel == panel.name
        ]
        texts = []
        for ours in (False, True):
            counted = Counter(
                claim.reproduced for claim in claims if ours is not bool(self.claimed(claim).source)
            )
            words = [f"{counted[v]} {both[ours]}" for v, both in WORDS.items() if counted[v]]
            texts.append(", ".join(words))
        return texts[0], texts[1]

    @property
    def unrun(self) -> str:
        """Why runs are missing, how many, and the hours that they would take."""
        names, stored = {member.name for member in self.missing}, self.stored
        known = all(member.name not in names for member in self.experiment.members())
        more = not known and type(self.experiment).followers is not Experiment.followers
        text = (
            f"{self.judgement.not_run.strip()} {len(names):,} of {len(self.members):,} runs are "
            f"missing{', not counting those that follow from their results' * more}"
        ).strip()
        if on_cores := len(stored.members) - stored.on_gpu:
            seconds = len(names) * stored.seconds / on_cores
            return f"{text}: an estimated {_duration(seconds)} of one core."
        return f"{text}."

    @cached_property
    def page(self) -> str:
        """README.md of the experiment, from ``page.md.j2``; it says so if there are no results."""
        figures = self.report.figures if self.report else {}
        text = _template().render(
            judged=self,
            judgement=self.judgement,
            stored=self.stored,
            report=self.report,
            tables={table.name: table for table in self.report.tables} if self.report else {},
            paper=PAPERS[self.judgement.paper_of],
            not_measured=NOT_MEASURED,
            flat=f"{FLAT:g}",
            printed=[
                [name, says, figures.get(name)] for name, says in self.judgement.paper.items()
            ],
            markdown_table=markdown_table,
        )
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    @property
    def machines(self) -> str:
        """Where the stored members were run, and for how long."""
        stored, count = self.stored, len(self.stored.members)
        cores = f"{_duration(stored.seconds)} on one core of a busy machine"
        mixed = f"{stored.on_gpu:,} of them on a GPU, {cores} for the rest"
        return {0: cores, count: "on a GPU"}.get(stored.on_gpu, mixed)

    def readings(self, claim: ExperimentClaim) -> dict[str, list[str]]:
        """What came out with each reading, by verdict, where the verdict turns with it."""
        by_verdict: dict[str, list[str]] = {}
        for reading, (reproduced, measured) in claim.readings.items() if claim.turns else ():
            word = self.claimed(claim).word(reproduced)
            by_verdict.setdefault(word, []).append(f"{reading}: *{measured}*")
        return by_verdict

    @property
    def flat_ends(self) -> list[str]:
        """Ends of grids beyond which a value may be as good as the best, in words."""
        return [
            f"{choice.of} (best {choice.value:g}, end {end:g})"
            for choice in (self.report.choices if self.report else ())
            for end in choice.flat_ends
        ]

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.experiment.directory.name

    @property
    def _figures(self) -> dict[str, float]:
        seeds = {"seeds": self.experiment.settings.seeds}
        return {**seeds, **(self.report.figures if self.report is not None else {})}

    def filled(self, sentence: str) -> str:
        """Insert figures into a sentence; places that name no figure are left unchanged."""
        figures = self._figures
        return _PLACE.sub(
            lambda p: format(figures[p[1]], p[2] or "g") if p[1] in figures else p[0], sentence
        )

    def summary(self, panel: Panel) -> Row:
        """A panel's row in the overview: how many of its claims have which verdict, and why."""
        if self.report is None:
            return [panel.name, f"`{self.name}`", "", "not measured", "", ""]
        seeds = str(self.experiment.settings.seeds)
        causes = dict.fromkeys(
            self.cause(claim)
            for claim in self.report.claims
            if claim.panel == panel.name and claim.reproduced is not True
        )
        return [panel.name, f"`{self.name}`", seeds, *self.counts(panel), "; ".join(causes)]

    def write(self, directory: Path) -> None:
        """Write README.md and the pictures into a directory, and remove other pictures."""
        (directory / "README.md").write_text(self.page, encoding="utf-8")
        for old in directory.glob("*.png"):
            old.unlink()
        for name, picture in (self.report.pictures if self.report else {}).items():
            save(picture, directory / f"{name}.png")


def judge(experiment: Experiment, stored: Stored) -> Judged:
    """Judge an experiment's results.

    Raises
    ------
    FedsimError
        If its ``judgement.toml`` cannot be read.
    """
    judgement = Judgement.load(experiment.directory)
    results, members = gathered(experiment, stored)
    report = None
    if results and (len(results) == len(members) or experiment.partial):
        report = experiment.report({name: one.result for name, one in results.items()})
    return Judged(experiment, judgement, Stored(results, stored.untimed), members, report)


def faults_of_page(judged: Judged) -> list[str]:
    """Differences of what its directory has, results, page and pictures, from what was judged."""
    directory, wrong = judged.experiment.directory, []
    kept = Stored.load(directory).members.keys()
    if over := sorted(kept - judged.stored.members.keys()):
        wrong.append(f"{len(over)} results are of no member's settings, such as {over[0]}.")
    page = directory / "README.md"
    if not page.is_file() or regular_files.read_text(page) != judged.page:
        wrong.append(f"{page} is not what results and judgement say; --store writes it.")
    pictures = set(judged.report.pictures) if judged.report else set()
    for name in sorted(pictures ^ {path.stem for path in directory.glob("*.png")}):
        word = "missing" if name in pictures else "of no figure here"
        wrong.append(f"{directory / name}.png is {word}; --store writes the pictures.")
    return wrong


def overview() -> str:
    """One page with every figure and table of the papers, next to what each paper says.

    In Markdown; pictures are linked below ``pictures/``.
    """
    root, blocks = Path(experiments.__file__).parent, [TEXTS["introduction"].strip()]
    everything = [
        judge(load(path, data=Path("data")), Stored.load(path)) for path in directories().values()
    ]
    for key, title in PAPERS.items():
        of_paper = [one for one in everything if one.judgement.paper_of == key]
        rows = [one.summary(panel) for one in of_paper for panel in one.judgement.panels]
        columns = ["panel", "experiment", "seeds", "the paper's claims", "ours", "cause"]
        blocks += [f"## {title}", markdown_table(columns, rows, 2)]
        for one in of_paper:
            pictures = f"pictures/{one.experiment.directory.relative_to(root).as_posix()}/"
            page = re.sub(r"^#", "###", one.page.strip(), flags=re.MULTILINE)
            blocks.append(re.sub(r"\]\((?=[\w-]+\.png\))", f"]({pictures}", page))
    return "\n\n".join(blocks) + "\n"


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.md.j2")


def markdown_table(columns: Sequence[str], rows: Sequence[Row], digits: int) -> str:
    """A Markdown table, with numbers rounded to ``digits``."""
    lines = [[_cell(column, digits) for column in columns], ["---"] * len(columns)]
    lines += [[_cell(value, digits) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str | float | None, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int):
        return str(value).replace("|", "\\|").replace("\n", " ")
    small = 0 < abs(value) < 10 ** (1 - digits)
    return f"{value:.{digits}g}" if small else f"{value:,.{digits}f}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} seconds"
    minutes = seconds / 60
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"

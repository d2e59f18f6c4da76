"""Judge an experiment's results, and write its page and pictures from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

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
    earlier : mapping of str to float
        Figures of an earlier run whose single results are not kept, shown if no others are stored;
        no verdict is based on them.
    """

    title: str
    paper_of: Annotated[str, _word(PAPERS)]
    about: str
    panels: Annotated[list[Panel], NOT_EMPTY]
    not_run: str = ""
    remarks: list[str] = field(default_factory=list)
    claims: dict[str, Claimed] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)
    earlier: dict[str, float] = field(default_factory=dict)

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
        wrong = []
        if self.missing and not self.judgement.not_run:
            wrong.append(
                f"{len(self.missing)} results are missing, such as {self.missing[0].name}, and "
                "not-run does not say why."
            )
        if self.judgement.not_run and not self.missing:
            wrong.append("not-run says why runs are missing, and none is.")
        return wrong if self.report is None else wrong + self._faults_of(self.report)

    def _faults_of(self, report: Report) -> list[str]:
        judgement, seeds = self.judgement, self.experiment.settings.seeds
        wrong = [
            f"{choice.of}: the best of {', '.join(f'{value:g}' for value in sorted(choice.scores))}"
            f" is {choice.value:g}, at the grid's edge; the grid must go on beyond it."
            for choice in report.choices
            if choice.at_edge
        ]
        if seeds < MIN_SEEDS:
            wrong.append(f"seeds = {seeds}; a verdict needs {MIN_SEEDS} or more.")
        claims = {claim.name: claim for claim in report.claims}
        places = [p[1] for text in judgement.sentences() for p in _PLACE.finditer(text)]
        wrong += _unknown("claims", judgement.claims, claims)
        wrong += _unknown("paper", judgement.paper, report.figures)
        wrong += _unknown("sentences", places, self._figures)
        tables = [table.name for table in report.tables]
        for panel in judgement.panels:
            wrong += _unknown(f"{panel.name}: pictures", panel.pictures, report.pictures)
            wrong += _unknown(f"{panel.name}: tables", panel.tables, tables)
        wrong += [f"claims.{name} is missing." for name in claims if name not in judgement.claims]
        for name, claimed in judgement.claims.items():
            if name in claims:
                wrong += self._claim_faults(claims[name], claimed)
        return wrong

    def _claim_faults(self, claim: ExperimentClaim, claimed: Claimed) -> list[str]:
        wrong = []
        if (verdict := claimed.word(claim.reproduced)) != claimed.verdict:
            wrong.append(
                f"claims.{claim.name} is judged '{claimed.verdict}' and came out "
                f"'{verdict}': {claim.measured}."
            )
        if (claim.reproduced is True or claim.turns) == bool(claimed.cause):
            wrong.append(
                f"claims.{claim.name}.cause is {claimed.cause!r}; it says what a claim that is not "
                "reproduced, or not decided, is put down to, and only there; where readings differ "
                "that is the cause."
            )
        if claim.panel not in [panel.name for panel in self.judgement.panels]:
            wrong.append(f"claims.{claim.name} is about {claim.panel!r}, which is no panel.")
        return wrong

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
        """README.md of the experiment; without results it states that there are none."""
        judgement, stored, name = self.judgement, self.stored, self.name
        count = len(stored.members)
        checked = "judges the stored results again" if count else "says what it would take"
        blocks = [
            f"# {judgement.title}",
            f"    fedsim experiment {name} --data DIRECTORY\n"
            f"    fedsim experiment {name} --check             # {checked}",
            f"{PAPERS[judgement.paper_of]}.",
            self._filled(judgement.about.strip()),
        ]
        if count:
            cores = f"{_duration(stored.seconds)} on one core of a busy machine"
            mixed = f"{stored.on_gpu:,} of them on a GPU, {cores} for the rest"
            machines = {0: cores, count: "on a GPU"}.get(stored.on_gpu, mixed)
            private = sum("ledger" in member.result for member in stored.members.values())
            ledgers = f" {TEXTS['private'].format(count=private)}" if private else ""
            blocks.append(
                f"{count:,} runs, {machines}. Everything below is written from `results.json` "
                f"({stored.fingerprint}) and `judgement.toml`. {TEXTS['rule']}{ledgers}"
            )
            paper, ours = self.counts()
            blocks.append(f"Claims of the paper: {paper or 'none'}. Ours: {ours or 'none'}.")
        return "\n\n".join([*blocks, *self._sections()]) + "\n"

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.experiment.directory.name

    def _sections(self) -> list[str]:
        """Markdown of every panel, the remarks, and the paper's numbers, each under a heading."""
        judgement, report = self.judgement, self.report
        if report is None:
            settings = [f"- **{p.name}.** {self._setting(p, ' ')}" for p in judgement.panels]
            blocks = [f"**{NOT_MEASURED}** {self.unrun}", "\n".join(settings)]
            if judgement.earlier:
                table = markdown_table(["figure", "then"], list(judgement.earlier.items()), 3)
                blocks += ["## Figures of an earlier run", TEXTS["earlier"], table]
            return blocks
        blocks = []
        for panel in judgement.panels:
            blocks += [f"## {panel.name}", *self._panel(panel, report)]
        remarks = [f"- {self._filled(remark)}" for remark in judgement.remarks]
        ends = [
            f"{choice.of} (best {choice.value:g}, end {end:g})"
            for choice in report.choices
            for end in choice.flat_ends
        ]
        if ends:
            remarks.append("- " + TEXTS["flat"].format(flat=f"{FLAT:g}", ends="; ".join(ends)))
        if remarks:
            blocks += ["## Remarks", "\n".join(remarks)]
        if self.missing:
            blocks += ["## What was not run", self.unrun]
        if judgement.paper:
            here = report.figures
            rows = [[name, says, here.get(name)] for name, says in judgement.paper.items()]
            table = markdown_table(["figure", "paper", "here"], rows, 3)
            blocks += ["## Figures that the paper prints", table]
        return blocks

    def _panel(self, panel: Panel, report: Report) -> Iterator[str]:
        """Markdown of one figure or table: both settings, verdicts, tables and pictures."""
        yield self._setting(panel, "\n\n")
        lines = [self._line(claim) for claim in report.claims if claim.panel == panel.name]
        if lines:
            yield "\n".join(lines)
        tables = {table.name: table for table in report.tables}
        for table in (tables[name] for name in panel.tables if name in tables):
            yield ", ".join(table.title.splitlines())
            yield markdown_table(table.columns, table.rows, table.digits)
        for name in panel.pictures:  # each links to itself, as columns may be too narrow for it
            yield f"[![{panel.name}: {name}]({name}.png)]({name}.png)"

    def _line(self, claim: ExperimentClaim) -> str:
        """A claim's verdict, whose it is, and what was measured, with each reading."""
        claimed = self.claimed(claim)
        whose = f"The paper ({claimed.source})" if claimed.source else "Ours"
        cause = f" ({self.cause(claim)})" if self.cause(claim) else ""
        why = f" {self._filled(claimed.why)}" if claimed.why else ""
        verdict = claimed.word(claim.reproduced)
        head = f"- **{verdict.capitalize()}**{cause}. {whose}: {claim.says}"
        if not claim.turns:
            return f"{head}: *{claim.measured}*.{why}"
        sides: dict[str, list[str]] = {}
        for reading, (reproduced, measured) in claim.readings.items():
            side = sides.setdefault(claimed.word(reproduced), [])
            side.append(f"{reading}: *{measured}*")
        lines = [f"    - {word.capitalize()} {'; '.join(side)}" for word, side in sides.items()]
        return "\n".join([f"{head}.{why}", *lines])

    def _setting(self, panel: Panel, between: str) -> str:
        return f"*In the paper:* {panel.shows}{between}*Here:* {self._filled(panel.setting)}"

    @property
    def _figures(self) -> dict[str, float]:
        seeds = {"seeds": self.experiment.settings.seeds}
        return {**seeds, **(self.report.figures if self.report is not None else {})}

    def _filled(self, sentence: str) -> str:
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
    results, members = gathered(experiment, stored.get)
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


def _unknown(what: str, named: Collection[str], known: Collection[str]) -> list[str]:
    return [f"{what}: there is no {name!r} in the report." for name in named if name not in known]


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

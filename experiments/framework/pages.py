"""Markdown pages of experiments and panels, made from results and judgement alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.framework.base import (
    FLAT,
    BestOfGrid,
    ExperimentMember,
    PaperClaim,
    Report,
    Table,
)
from experiments.framework.judgement import Claimed, Judgement, Panel, filled
from experiments.framework.stored import Stored

PAPERS = {
    "koskela": (
        "Koskela and Honkela, Learning Rate Adaptation for Federated and Differentially Private "
        "Learning, arXiv 1809.03832"
    ),
    "das": (
        "Das, Hashemi, Sanghavi and Dhillon, On the Convergence of Differentially Private "
        "Federated Learning on Non-Lipschitz Objectives, and with Normalized Client Updates, "
        "arXiv 2106.07094"
    ),
    "pichapati": (
        "Pichapati, Suresh, Yu, Reddi and Kumar, AdaCliP: Adaptive Clipping for Private SGD, "
        "arXiv 1908.07643"
    ),
    "xu": (
        "Xu, Shi, Liu, Zhao and Chen, An adaptive and fast convergent approach to differentially "
        "private deep learning, arXiv 1912.09150"
    ),
    "plans": (
        "After the papers: correlated noise (Choquette-Choo et al. 2023) and random allocation "
        "(Feldman and Shenfeld 2025)"
    ),
    "niid": (
        "Li, Diao, Chen and He, Federated Learning on Non-IID Data Silos: An Experimental Study, "
        "arXiv 2102.02079"
    ),
    "landscape": "After the papers: private methods beside each other",
}
NOT_MEASURED = "Not measured: nothing here is judged."
EARLIER = (
    "Means over the seeds of a run whose single runs are not kept, partly on other grids. Nothing "
    "is judged by them."
)
CAUSES = {
    "": "",
    "setting": "a reading: our setting",
    "scale": "a reading: our smaller scale",
    "printed": "a reading: the algorithm as printed",
    "unit": "it turns with the unit of eta_0, which the paper does not give",
    "seeds": "the spread over seeds",
    "paper": "the paper's own, by calculation",
    "unrun": "runs are missing",
}
RULE = (
    "A claim about several comparisons is *reproduced* if every interval at 95 % lies on its side, "
    "and *not reproduced* if one lies on the other side, with intervals that hold at 95 % for all "
    "of them together; otherwise it is *not decided*. A cause called a reading is our guess."
)


@dataclass(frozen=True)
class Missing:
    """A member that has not been run.

    Attributes
    ----------
    seconds : float or None
        Expected seconds on one core; None if no similar run is stored.
    """

    member: ExperimentMember
    seconds: float | None


@dataclass(frozen=True)
class MissingRuns:
    """The members that have not been run.

    Attributes
    ----------
    sentence : str
        How many they are, why they are missing, and how long they would take.
    cells : list of (str, str, int, float)
        Each cell's name, a pattern of its missing members, their number, and their hours of one
        core; empty if no time is known.
    """

    sentence: str
    cells: Sequence[tuple[str, str, int, float]] = ()

    def markdown(self, name: str) -> str:
        """The text for an experiment's page, with a command for each cell."""
        if not self.cells:
            return self.sentence
        rows: list[list[str | float | None]] = [
            [cell, runs, hours, f'`fedsim experiment {name} --only "{pattern}" --store`']
            for cell, pattern, runs, hours in self.cells
        ]
        table = markdown_table(["not run", "runs", "hours of one core", "command"], rows, 2)
        return f"{self.sentence}\n\n{table}"


def unrun(
    judgement: Judgement, missing: Sequence[Missing], total: int, *, more: bool
) -> MissingRuns:
    """Describe the missing members: why they are missing, and each cell's hours.

    Parameters
    ----------
    total : int
        Number of known members.
    more : bool
        Whether further members will follow from the results of the missing ones.
    """
    following = ", not counting those that follow from their results" if more else ""
    says = f"{len(missing):,} of {total:,} runs are missing{following}"
    seconds = [one.seconds for one in missing if one.seconds is not None]
    text = f"{judgement.not_run.strip()} {says}".strip()
    if not seconds:
        return MissingRuns(f"{text}.")
    cells: dict[str, list[float]] = {}
    for one in missing:
        cells.setdefault(one.member.cell, []).append(one.seconds or 0.0)
    names = {one.member.name for one in missing}
    return MissingRuns(
        f"{text}: an estimated {_duration(sum(seconds))} of one core.",
        [
            (cell, cell if cell in names else f"{cell} *", len(of_cell), sum(of_cell) / 3600)
            for cell, of_cell in cells.items()
        ],
    )


def readme(
    name: str,
    judgement: Judgement,
    stored: Stored,
    report: Report | None,
    *,
    seeds: int,
    missing: str = "",
) -> str:
    """README.md of an experiment; without results it states that there are none."""
    checked = "judges the stored results again" if stored.members else "says what it would take"
    blocks = [
        f"# {judgement.title}",
        f"    fedsim experiment {name} --data DIRECTORY\n"
        f"    fedsim experiment {name} --check             # {checked}",
        f"{PAPERS[judgement.paper_of]}.",
        about(judgement, report, seeds),
    ]
    if stored.members:
        blocks.append(
            f"{len(stored.members):,} runs, {_machines(stored)}. Everything below is written from "
            f"`results.json` ({stored.fingerprint}) and `judgement.toml`. {RULE}"
            f"{_ledgers(stored)}"
        )
    panels = sections(judgement, report, seeds=seeds, heading="##", missing=missing)
    return "\n\n".join([*blocks, *panels]) + "\n"


def _machines(stored: Stored) -> str:
    if stored.on_gpu == len(stored.members):
        return "on a GPU"
    cores = f"{_duration(stored.seconds)} on one core of a busy machine"
    return f"{stored.on_gpu:,} of them on a GPU, {cores} for the rest" if stored.on_gpu else cores


def _ledgers(stored: Stored) -> str:
    if not stored.ledgers:
        return ""
    return (
        f" {stored.ledgers:,} runs are private: each had a directory of its own (`runs/` below "
        "`--out`), named by the digest of its settings, in which `fedsim privacy RUN --verify` "
        "found nothing wrong before its result counted; `results.json` has the final hash of each "
        "ledger."
    )


def about(judgement: Judgement, report: Report | None, seeds: int) -> str:
    """The paragraph on what is run and how."""
    return filled(judgement.about.strip(), _figures(report, seeds))


def _figures(report: Report | None, seeds: int) -> dict[str, float]:
    """Figures that can be inserted into sentences."""
    return {"seeds": seeds, **(report.figures if report is not None else {})}


def sections(
    judgement: Judgement,
    report: Report | None,
    *,
    seeds: int,
    heading: str,
    of: str = "",
    pictures: str = "",
    missing: str = "",
) -> list[str]:
    """Markdown of every panel, the remarks, and the paper's numbers, each under a heading.

    Parameters
    ----------
    seeds : int
        Value of ``{seeds}`` in the judgement's sentences.
    heading : str
        Markdown prefix of a heading, such as ``##``.
    of : str
        Text appended to each heading.
    pictures : str
        Prefix of a picture's file name in a link.
    missing : str
        Markdown of `MissingRuns` on members that have not been run.
    """
    figures = _figures(report, seeds)
    if report is None:
        panels = [
            f"- **{panel.name}{of}.** {_settings(panel, figures)}" for panel in judgement.panels
        ]
        blocks = [f"**{NOT_MEASURED}** {missing}", "\n".join(panels)]
        if judgement.earlier:
            blocks += [f"{heading} Figures of an earlier run{of}", _earlier(judgement)]
        return blocks
    blocks = []
    for panel in judgement.panels:
        blocks.append(f"{heading} {panel.name}{of}")
        blocks.append(_panel_text(panel, judgement, report, figures, pictures))
    remarks = [f"- {filled(remark, figures)}" for remark in judgement.remarks]
    if flat := _flat_ends(report.choices):
        remarks.append(f"- {flat}")
    if remarks:
        blocks += [f"{heading} Remarks{of}", "\n".join(remarks)]
    if missing:
        blocks += [f"{heading} What was not run{of}", missing]
    if judgement.paper:
        blocks += [f"{heading} Figures that the paper prints{of}", _comparison(judgement, report)]
    return blocks


def _settings(panel: Panel, figures: Mapping[str, float], between: str = " ") -> str:
    """Text on the paper's setting and the setting here."""
    return f"*In the paper:* {panel.shows}{between}*Here:* {filled(panel.setting, figures)}"


def _panel_text(
    panel: Panel,
    judgement: Judgement,
    report: Report,
    figures: Mapping[str, float],
    pictures: str,
) -> str:
    """Markdown of one figure or table: both settings, verdicts, tables and pictures."""
    blocks = [_settings(panel, figures, between="\n\n")]
    claims = [claim for claim in report.claims if claim.panel == panel.name]
    if claims:
        blocks.append(_verdicts(claims, judgement.claims, figures))
    tables = {table.name: table for table in report.tables}
    blocks += [_table(tables[name]) for name in panel.tables]
    blocks += [
        _picture(f"{panel.name}: {name}", f"{pictures}{name}.png") for name in panel.pictures
    ]
    return "\n\n".join(blocks)


def _picture(says: str, file: str) -> str:
    """A picture that links to itself in full size, as columns may be too narrow for it."""
    return f"[![{says}]({file})]({file})"


def _verdicts(
    claims: Sequence[PaperClaim], judged: Mapping[str, Claimed], figures: Mapping[str, float]
) -> str:
    """One line per claim: the verdict, its cause, and what was measured."""
    lines = []
    for claim in claims:
        claimed = judged.get(claim.name)
        cause = f" ({CAUSES[claimed.cause]})" if claimed and claimed.cause else ""
        why = f" {filled(claimed.why, figures)}" if claimed and claimed.why else ""
        verdict = claim.verdict.capitalize()
        lines.append(f"- **{verdict}**{cause}: {claim.says}: *{claim.measured}*.{why}")
    return "\n".join(lines)


def _flat_ends(choices: Sequence[BestOfGrid]) -> str:
    """Sentence on grids with an end whose score is close to the best; empty if none has."""
    ends = [
        f"{choice.of} (best {choice.value:g}, end {end:g})"
        for choice in choices
        for end in choice.flat_ends
    ]
    if not ends:
        return ""
    return (
        f"Grids with an end that is within {FLAT:g} (points, or decibels of an error) of their "
        f"best, beyond which a value may be as good: {'; '.join(ends)}."
    )


def _earlier(judgement: Judgement) -> str:
    """Table of figures of an earlier run, with a note that no verdict is based on them."""
    rows: list[list[str | float | None]] = list(map(list, judgement.earlier.items()))
    return f"{EARLIER}\n\n{markdown_table(['figure', 'then'], rows, 3)}"


def _comparison(judgement: Judgement, report: Report) -> str:
    rows: list[list[str | float | None]] = [
        [name, paper, report.figures[name]] for name, paper in judgement.paper.items()
    ]
    return markdown_table(["figure", "paper", "here"], rows, 3)


def _table(table: Table) -> str:
    title = ", ".join(table.title.splitlines())
    return f"{title}\n\n{markdown_table(table.columns, table.rows, table.digits)}"


def markdown_table(
    columns: Sequence[str], rows: Sequence[Sequence[str | float | None]], digits: int
) -> str:
    """A Markdown table, with numbers rounded to ``digits``."""
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(value, digits) for value in row] for row in rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _cell(value: str | float | None, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int):
        return str(value)
    small = 0 < abs(value) < 10 ** (1 - digits)
    return f"{value:.{digits}g}" if small else f"{value:,.{digits}f}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} seconds"
    minutes = seconds / 60
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"

"""One page with every figure and table of the papers, next to what each paper says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from experiments.framework.base import Report, Verdict
from experiments.framework.checking import check
from experiments.framework.directories import find, load, names
from experiments.framework.judgement import Judgement, Panel
from experiments.framework.pages import CAUSES, PAPERS, RULE, about, markdown_table, sections

INTRODUCTION = f"""# The papers

Every figure and table, beside what the paper says of it: our setting, the seeds, the verdict, and
what a claim that is not reproduced is put down to. {RULE}

Methods that are compared share one grid or a stated budget (methods that whiten rows try larger
rates as well), no best value lies at a grid's edge, and no verdict rests on one seed: `fedsim
experiment NAME --check` judges the stored results by these rules again. What has no stored results
says so, and says what it would take."""


@dataclass(frozen=True)
class _Entry:
    name: str
    folder: str
    seeds: int
    judgement: Judgement
    report: Report | None
    missing: str


def overview() -> str:
    """The page, in Markdown; pictures are linked below ``pictures/``."""
    entries = [_entry(name) for name in names()]
    blocks = [INTRODUCTION]
    for key, title in PAPERS.items():
        of_paper = [entry for entry in entries if entry.judgement.paper_of == key]
        blocks += [f"## {title}", _summary(of_paper)]
        for entry in of_paper:
            blocks += [
                f"### {entry.judgement.title}",
                about(entry.judgement, entry.report, entry.seeds),
            ]
            blocks += sections(
                entry.judgement,
                entry.report,
                seeds=entry.seeds,
                heading="####",
                of=f" ({entry.name})",
                missing=entry.missing,
                pictures=f"pictures/{entry.folder}/",
            )
    return "\n\n".join(blocks) + "\n"


def _entry(name: str) -> _Entry:
    import experiments

    directory = find(name)
    checked = check(directory)
    return _Entry(
        name,
        directory.relative_to(Path(experiments.__file__).parent).as_posix(),
        load(directory, data=Path("data")).settings.seeds,
        Judgement.load(directory),
        checked.report,
        checked.unrun.markdown(directory.name) if checked.unrun else "",
    )


def _summary(entries: list[_Entry]) -> str:
    rows: list[list[str | float | None]] = []
    for entry in entries:
        for panel in entry.judgement.panels:
            verdict, cause = _verdict(entry, panel)
            seeds = str(entry.seeds) if entry.report else ""
            rows.append([panel.name, f"`{entry.name}`", seeds, verdict, cause])
    return markdown_table(["panel", "experiment", "seeds", "verdict", "cause"], rows, 2)


def _verdict(entry: _Entry, panel: Panel) -> tuple[str, str]:
    if entry.report is None:
        return "not measured", ""
    claims = [claim for claim in entry.report.claims if claim.panel == panel.name]
    judged = entry.judgement.claims
    counts = Counter(claim.verdict for claim in claims)
    verdict = ", ".join(f"{counts[word]} {word}" for word in get_args(Verdict) if counts[word])
    others = [claim.name for claim in claims if claim.reproduced is not True]
    causes = dict.fromkeys(judged[name].cause for name in others if name in judged)
    return verdict, "; ".join(CAUSES[one] for one in causes)

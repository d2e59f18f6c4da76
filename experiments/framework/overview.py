"""One page of every figure and table of the four papers, beside what each paper says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.framework.base import PaperClaim, Report
from experiments.framework.judgement import Judgement, Panel
from experiments.framework.pages import PAPERS, WHOSE, about, markdown_table, sections
from experiments.framework.run import check, find, load, names

__all__ = ["overview"]

INTRODUCTION = """# The four papers

Every figure and table, beside what the paper says of it: our setting, the seeds, what holds, and
whose the difference is where it does not: *ours* (a setting or a reading of the text), of *scale*,
or *the paper's*. Methods that are compared share one grid or a stated budget, no best value lies at
a grid's edge, and no verdict rests on one seed: `fedsim experiment NAME --check` judges the stored
results by these rules anew. What has no stored results says so, and says what it would take."""


@dataclass(frozen=True)
class _Entry:
    name: str
    folder: str
    seeds: int
    judgement: Judgement
    report: Report | None


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
                pictures=f"pictures/{entry.folder}/",
            )
    return "\n\n".join(blocks) + "\n"


def _entry(name: str) -> _Entry:
    import experiments

    directory = find(name)
    return _Entry(
        name,
        directory.relative_to(Path(experiments.__file__).parent).as_posix(),
        load(directory, data=Path("data")).settings.seeds,
        Judgement.load(directory),
        check(directory).report,
    )


def _summary(entries: list[_Entry]) -> str:
    rows: list[list[str | float | None]] = []
    for entry in entries:
        for panel in entry.judgement.panels:
            verdict, whose = _verdict(entry, panel)
            seeds = str(entry.seeds) if entry.report else ""
            rows.append([panel.name, f"`{entry.name}`", seeds, verdict, whose])
    return markdown_table(["panel", "experiment", "seeds", "verdict", "difference"], rows, 2)


def _verdict(entry: _Entry, panel: Panel) -> tuple[str, str]:
    if entry.report is None:
        return "not measured", ""
    claims = [claim for claim in entry.report.claims if claim.panel == panel.name]
    judged = entry.judgement.claims
    counts = {
        "hold": sum(claim.holds is True for claim in claims),
        "do not": sum(claim.holds is False for claim in claims),
        "undecided": sum(claim.holds is None for claim in claims),
    }
    verdict = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    whose = dict.fromkeys(judged[name].whose for name in _others(claims) if name in judged)
    return verdict, "; ".join(WHOSE[one].partition(":")[0] for one in whose)


def _others(claims: list[PaperClaim]) -> list[str]:
    return [claim.name for claim in claims if claim.holds is not True]

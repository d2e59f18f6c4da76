"""Where each item of the four papers stands: a page from ``items.toml`` and the judgements."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import experiments
from experiments.framework.base import read_table
from experiments.framework.judge import PAPERS, TEXTS, Judgement, markdown_table
from experiments.framework.run import find, read_toml


@dataclass(frozen=True, kw_only=True)
class PaperItem:
    """An item of a paper: claims whose verdicts it takes, or a status and what shows it."""

    item: str
    claims: list[str] = field(default_factory=list)
    status: str = ""
    shown: str = ""
    note: str = ""


@dataclass(frozen=True)
class PaperItems:
    """All items of a paper."""

    items: list[PaperItem]


def items() -> dict[str, list[PaperItem]]:
    """Items by the paper's name in ``pages.toml``."""
    path = Path(experiments.__file__).parent / "items.toml"
    tree: dict[str, Any] = read_toml(path)
    return {
        paper: read_table(PaperItems, of_paper, f"{path}: {paper}.").items
        for paper, of_paper in tree.items()
    }


def papers() -> str:
    """The page, in Markdown."""
    table = items()
    count = sum(map(len, table.values()))
    blocks = [TEXTS["items"]["introduction"].strip().format(count=count)]
    for paper, of_paper in table.items():
        rows = [[one.item, *_stands(one), one.note] for one in of_paper]
        columns = ["item", "stands", "shown by", "note"]
        blocks += [f"## {PAPERS[paper]}", markdown_table(columns, rows, 2)]
    return "\n\n".join(blocks) + "\n"


def _stands(item: PaperItem) -> tuple[str, str]:
    """Where an item stands, and what shows it."""
    if not item.claims:
        return item.status, f"`{item.shown}`"
    by_verdict: dict[str, dict[str, None]] = {}
    for claim in item.claims:
        name, _, key = claim.partition("/")
        verdict = Judgement.load(find(name)).claims[key].verdict
        by_verdict.setdefault(verdict, {})[f"`{name}`"] = None
    shown = dict.fromkeys(name for names in by_verdict.values() for name in names)
    if len(by_verdict) == 1:
        return next(iter(by_verdict)), ", ".join(shown)
    apart = [f"{verdict} ({', '.join(names)})" for verdict, names in by_verdict.items()]
    return "; ".join(apart), ", ".join(shown)

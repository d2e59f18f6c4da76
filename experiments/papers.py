"""Where each item of the four papers stands: a page from ``items.toml`` and the judgements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import experiments
from experiments.framework.judge import PAPERS, TEXTS, Judgement, markdown_table
from experiments.framework.run import find
from fedsim.config.run_config import read_tree


def items() -> dict[str, list[dict[str, Any]]]:
    """Items by the paper's name in ``pages.toml``.

    An item has its name (``item``), ``claims`` whose verdicts it takes, or a ``status`` and what
    shows it (``shown``), and perhaps a ``note``.
    """
    tree = read_tree(Path(experiments.__file__).parent / "items.toml")
    return {paper: of_paper["items"] for paper, of_paper in tree.items()}


def papers() -> str:
    """The page, in Markdown."""
    table = items()
    count = sum(map(len, table.values()))
    blocks = [TEXTS["items"]["introduction"].strip().format(count=count)]
    for paper, of_paper in table.items():
        rows = [[one["item"], *_stands(one), one.get("note")] for one in of_paper]
        columns = ["item", "stands", "shown by", "note"]
        blocks += [f"## {PAPERS[paper]}", markdown_table(columns, rows)]
    return "\n\n".join(blocks) + "\n"


def _stands(item: Mapping[str, Any]) -> tuple[str, str]:
    """Where an item stands, and what shows it."""
    if "claims" not in item:
        return item["status"], f"`{item['shown']}`"
    by_verdict: dict[str, dict[str, None]] = {}
    for claim in item["claims"]:
        name, _, key = claim.partition("/")
        verdict = Judgement.load(find(name)).claims[key].verdict
        by_verdict.setdefault(verdict, {})[f"`{name}`"] = None
    shown = dict.fromkeys(name for names in by_verdict.values() for name in names)
    if len(by_verdict) == 1:
        return next(iter(by_verdict)), ", ".join(shown)
    apart = [f"{verdict} ({', '.join(names)})" for verdict, names in by_verdict.items()]
    return "; ".join(apart), ", ".join(shown)

"""Every item of the papers has something that shows where it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from experiments.framework.judge import Judgement
from experiments.framework.run import directories
from experiments.papers import items, papers

ROOT = Path(__file__).parents[2]
ALL = [one for of_paper in items().values() for one in of_paper]
STATUSES = {"implemented and tested", "no data here", "not run"}


@pytest.mark.parametrize("item", ALL, ids=lambda item: item["item"])
def test_an_item_is_shown_by_a_claim_of_the_paper_a_test_or_a_page(item: dict[str, Any]) -> None:
    assert item.keys() <= {"item", "claims", "status", "shown", "note"}
    assert ("claims" in item) is not ({"status", "shown"} <= item.keys())
    for name in item.get("claims", []):
        experiment, _, claim = name.partition("/")
        claimed = Judgement.load(directories()[experiment]).claims[claim]
        assert claimed.source or "ours" in item["note"]
    if "status" in item:
        assert item["status"] in STATUSES
        file, _, test = item["shown"].partition("::")
        if item["status"] == "implemented and tested":
            assert re.search(rf"\bdef {test}\(", (ROOT / file).read_text())
        else:
            assert Judgement.load(directories()[item["shown"]]).not_run


def test_every_claim_of_the_four_papers_is_of_an_item() -> None:
    """So that no claim is left out for its verdict."""
    listed = {name for item in ALL for name in item.get("claims", [])}
    claims = {
        f"{name}/{claim}"
        for name, directory in directories().items()
        if (judgement := Judgement.load(directory)).paper_of in items()
        for claim, claimed in judgement.claims.items()
        if claimed.source
    }
    assert claims - listed == set()


def test_the_page_says_how_many_items_it_lists_and_where_they_stand_apart() -> None:
    page = papers()
    assert page.count("\n| ") - 2 * len(items()) == len(ALL)
    assert f"Of the four papers {len(ALL)} items are listed" in page
    assert (
        "| Fig. 3 | not reproduced (`koskela-federated`); not decided (`koskela-cifar10`) |" in page
    )

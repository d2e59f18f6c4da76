"""What a row of the leaderboard says, and what it does not make up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from experiments import leaderboard as board
from experiments.framework.config_runs import LeaderboardEntry
from experiments.framework.run import Stored
from fedsim.config import RunConfig
from fedsim.errors import FedsimError

PAGE = (Path(__file__).parents[2] / "docs" / "leaderboard.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| data |", "| --- |"))
]
RUN: dict[str, Any] = {"settings": "", "result": {"epsilon": 1.9999, "accuracy": [0.5]}}
PRIVATE = {"mechanism.name": "clipping", "mechanism.clip-norm": 1.0, "noise.multiplier": 1.0}


def row(*stored: dict[str, Any], untimed: float = 0.0, **keys: Any) -> dict[str, str]:
    members = {f"m seed={seed}": one for seed, one in enumerate(stored, 1)}
    entry = LeaderboardEntry(
        "method", "federation", {name: 50.0 + k for k, name in enumerate(members)}
    )
    config = RunConfig.from_run_config({**PRIVATE, **keys})
    return board._row("name", config, Stored(members, untimed), entry)


def test_every_row_of_the_page_has_every_column_and_names_lossy_data() -> None:
    assert len(ROWS) > 90
    for cells in ROWS:
        assert len(cells) == 11
        assert all(cells)
        assert ("lossy JPEG" in cells[0]) is cells[0].startswith("CIFAR-10")
        private = cells[2] in ("client", "example")
        assert private or cells[2:5] == ["none"] * 3
        assert not private or re.fullmatch(r"\d+\.\d\d \((simulated|ledger verified)\)", cells[3])
        assert int(cells[6]) >= 3


@pytest.mark.parametrize(
    ("entropy", "proof"),
    [("", "simulated"), ("config", "simulated"), ("system", "ledger verified")],
)
def test_an_epsilon_is_simulated_unless_noise_came_from_the_system(
    entropy: str, proof: str
) -> None:
    made = row(RUN, **{"noise.entropy": entropy})
    assert made["epsilon"] == f"2.00 ({proof})"
    assert (made["delta"], made["level"]) == ("1e-05", "client")


def test_what_a_run_did_not_store_says_so() -> None:
    made = row(RUN, RUN | {"seconds": 3.0, "date": "2026-11-28", "commit": "abc"})
    assert made["date"] == "not stored, 2026-11-28"
    assert made["commit"] == "not stored, abc"
    assert made["seconds"] == "not stored: 1 on a GPU"
    assert (made["accuracy (%)"], made["seeds"]) == ("50.50 ± 0.71", "2")
    assert row(RUN | {"seconds": 3.0}, RUN | {"seconds": 4.0})["seconds"] == "7"
    assert row(RUN | {"gpu": 8.0})["seconds"] == "8 on a GPU"
    assert row(RUN, untimed=90.0)["seconds"] == "90 for all 1 runs"


def test_a_row_of_others_has_all_columns_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"federation": "theirs"} | dict.fromkeys(board.COLUMNS, "50.00 of x")
    texts = board.TEXTS["leaderboard"]
    monkeypatch.setattr(board, "_stored_rows", list)
    monkeypatch.setitem(texts, "rows", [full])
    assert f"| {' | '.join(['50.00 of x'] * len(board.COLUMNS))} |" in board.leaderboard()
    del full["commit"]
    with pytest.raises(FedsimError, match="it must have federation, data, method, level"):
        board.leaderboard()

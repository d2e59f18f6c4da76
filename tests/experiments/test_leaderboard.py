"""What a row of the leaderboard says, and what it does not make up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from experiments import leaderboard as board
from experiments.framework.base import LeaderboardEntry, Result, read_table
from experiments.framework.run import Stored, StoredResult
from experiments.leaderboard import LeaderboardRow, OthersRows
from fedsim.config import RunConfig
from fedsim.errors import FedsimError

PAGE = (Path(__file__).parents[2] / "docs" / "leaderboard.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| data |", "| --- |"))
]
RUN: Result = {"epsilon": 1.9999, "accuracy": [0.5]}
PRIVATE = {"mechanism.name": "clipping", "mechanism.clip-norm": 1.0, "noise.multiplier": 1.0}


def row(*stored: StoredResult, untimed: float = 0.0, **keys: Any) -> LeaderboardRow:
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
    made = row(StoredResult("", RUN), **{"noise.entropy": entropy})
    assert (made.epsilon, made.delta, made.level) == (f"2.00 ({proof})", "1e-05", "client")


def test_what_a_run_did_not_store_says_so() -> None:
    made = row(StoredResult("", RUN), StoredResult("", RUN, 3.0, None, "2026-11-28", "abc"))
    assert (made.date, made.commit) == ("not stored, 2026-11-28", "not stored, abc")
    assert made.seconds == "not stored: 1 on a GPU"
    assert (made.accuracy, made.seeds) == ("50.50 ± 0.71", "2")
    assert row(StoredResult("", RUN, 3.0), StoredResult("", RUN, 4.0)).seconds == "7"
    assert row(StoredResult("", RUN, None, 8.0)).seconds == "8 on a GPU"
    assert row(StoredResult("", RUN), untimed=90.0).seconds == "90 for all 1 runs"


def test_a_row_of_others_has_all_columns_or_is_refused() -> None:
    full = {one.replace("_", "-"): "x" for one in LeaderboardRow.__dataclass_fields__}
    assert read_table(OthersRows, {"rows": [full]}).rows[0].commit == "x"
    del full["commit"]
    with pytest.raises(FedsimError, match=re.escape("rows[0].commit is not set")):
        read_table(OthersRows, {"rows": [full]})

"""The search by Optuna: its joint cost, and a search that is killed and started again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from killed_runs import killed_in

from fedsim.cohorts import PoissonCohort
from fedsim.privacy import Ledger, epsilon

SMALL = {"rounds": 2, "partition.clients": 40, "checkpoint.every": 1}
TRIALS = 3


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "optuna"))
    import search

    yield search
    sys.modules.pop("search", None)


def test_a_killed_search_continues_to_the_same_trials_and_each_is_charged_once(
    search, tmp_path: Path
) -> None:
    base = search.BASE.replace(**SMALL)
    whole = search.search(tmp_path / "whole", TRIALS, base)
    search.search(tmp_path / "killed", 1, base)
    with killed_in(2):
        search.search(tmp_path / "killed", TRIALS, base)
    continued = search.search(tmp_path / "killed", TRIALS, base)
    found = [[(t.params, t.value) for t in study.trials] for study in (whole, continued)]
    assert found[0] == found[1]
    assert len({str(params) for params, _ in found[0]}) == TRIALS
    together = epsilon(
        noise_multiplier=2.0, cohort=PoissonCohort(rate=0.1), rounds=2 * TRIALS, delta=1e-4
    )
    for name in ("whole", "killed"):
        ledger = Ledger.read(tmp_path / name / "ledger.jsonl")
        assert ledger.epsilon(1e-4) == pytest.approx(together, rel=1e-6)

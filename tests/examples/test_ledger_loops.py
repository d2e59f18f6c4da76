"""The ledger beside Flower's own strategy, a client mod, a loop with Opacus, and NVFlare."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from benchmarks.environments import environment
from fedsim.audit import SyntheticFederation
from fedsim.audit.adapters.flower import strategy_target
from fedsim.cohorts import FullCohort
from fedsim.errors import BudgetSpentError
from fedsim.privacy import DeclaredMechanism, Independent, Ledger, ReleasePlan
from fedsim.privacy.losses import gaussian_epsilon

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/ledger"))
from loops import Charged, ChargedNode, opacus_loop


def federation(rounds: int) -> SyntheticFederation:
    rows = np.random.default_rng(1).normal(size=(6, 64))
    return SyntheticFederation(rows, np.ones(6), rounds, seed=1)


class Mine(Charged, DifferentialPrivacyServerSideFixedClipping):
    """Flower's strategy, charged."""


def test_flowers_own_strategy_is_charged_round_by_round(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    plan = ReleasePlan(
        level="client",
        sampler=FullCohort(6, adjacency="zero-out"),
        mechanism=DeclaredMechanism("Flower's clipping", 1.0),
        noise=Independent(2.0),
        rounds=3,
    )

    def make(f: SyntheticFederation) -> Mine:
        strategy = Mine(FedAvg(fraction_evaluate=0.0), 2.0, 1.0, f.population)
        strategy.plan, strategy.ledger = plan, Ledger(path, delta=1e-5)
        return strategy

    assert len(strategy_target(make)(federation(3))["models"]) == 3
    assert Ledger.read(path).epsilon(1e-5) == pytest.approx(plan.epsilon(1e-5), rel=1e-9)


def test_a_node_keeps_a_ledger_and_a_budget_of_its_own(tmp_path: Path) -> None:
    one = gaussian_epsilon(2 / 4.0, 1e-5)
    nodes = [ChargedNode(tmp_path / f"{n}.jsonl", 1.0, 4.0, 2.5 * one) for n in range(1)]
    target = strategy_target(lambda f: FedAvg(fraction_evaluate=0.0), lambda f: nodes)
    few = federation(1)
    target(SyntheticFederation(few.rows[:2], np.ones(2), 1, seed=1))
    ledger = Ledger.read(tmp_path / "0.jsonl", delta=1e-5)
    # Both clients share the node here: two releases.
    assert len(ledger.entries) == 2
    assert ledger.epsilon() == pytest.approx(gaussian_epsilon(2 * 2**0.5 / 4.0, 1e-5), rel=1e-6)
    with pytest.raises(BudgetSpentError):
        target(SyntheticFederation(few.rows, np.ones(6), 6, seed=1))
    assert Ledger.read(tmp_path / "0.jsonl", delta=1e-5).epsilon() <= 2.5 * one


def test_a_loop_with_opacus_ends_at_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    opacus_loop(path, 5, max_epsilon=100.0)
    ledger = Ledger.read(path, delta=1e-5)
    assert [entry.round for entry in ledger.entries] == [1, 2, 3, 4, 5]
    other = tmp_path / "other.jsonl"
    with pytest.raises(BudgetSpentError):
        opacus_loop(other, 50, max_epsilon=ledger.epsilon())
    assert Ledger.read(other, delta=1e-5).epsilon() <= ledger.epsilon()


def test_all_three_run_to_the_end_of_their_budgets(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "examples/ledger/run.py"), str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    spent = [line for line in done.stdout.splitlines() if "releases" in line]
    assert spent == [
        "Strategy: 8 releases, epsilon 2.94",
        "Node 0: 8 releases, epsilon 2.94",
        "Opacus: 15 releases, epsilon 2.98",
    ]


@pytest.mark.slow
def test_a_run_of_nvflare_stops_at_its_budget(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    job = root / "examples/ledger/nvflare/job.py"
    python = environment(Path("build/referee/nvflare-2.9.0"), "nvflare==2.9.0")
    done = subprocess.run(
        [python, str(job), str(tmp_path), "4"],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "would exceed max-epsilon = 4.0" in done.stdout + done.stderr
    for site in ("site-1", "site-2", "site-3"):
        spent = np.loadtxt(tmp_path / f"{site}.csv", delimiter=",")
        # One site's row may be any other: two clip norms under noise of four.
        assert spent[:, 1] == pytest.approx(
            [gaussian_epsilon(n**0.5 / 2, 1e-5) for n in (1, 2, 3)], rel=1e-5
        )
        assert Ledger.read(tmp_path / f"{site}.jsonl").epsilon(1e-5) <= 4

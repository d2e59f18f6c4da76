"""A ledger beside somebody else's loop: written first, with_node_budget, declared by the user."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedsim.cohorts import CyclicCohort, FullCohort, PoissonCohort, SeparatedCohort
from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.privacy import DeclaredMechanism, Independent, Ledger, ReleasePlan
from fedsim.privacy.noise.banded import Banded
from fedsim.privacy.placement import CLIENTS

PLAN = ReleasePlan(
    level="client",
    sampler=PoissonCohort(rate=0.5, population=100),
    mechanism=DeclaredMechanism("clipping of theirs", clip_norm=2.0),
    noise=Independent(2.0),
    rounds=5,
)


def test_a_release_is_on_the_disk_before_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, delta=1e-5)
    for number in range(1, 4):
        with ledger.release(PLAN, number) as entry:
            assert Ledger.read(path).entries[-1] == entry
    assert Ledger.read(path).epsilon(1e-5) == pytest.approx(
        PLAN.epsilon(1e-5, after_round=3), rel=1e-9
    )
    words = str(Ledger.read(path).statement(1e-5))
    assert "as the user declares" in words
    assert "the mechanism, which is not fedsim's own" in words
    assert "The server sees the clients' updates before the noise, and is trusted." in words


def test_the_server_is_an_adversary_where_a_node_adds_its_noise_itself(tmp_path: Path) -> None:
    plan = ReleasePlan(
        level="client",
        sampler=FullCohort(1, adjacency="replace-one"),
        mechanism=DeclaredMechanism("clipping in a mod", 1.0),
        noise=Independent(8.0),
        placement=CLIENTS,
    )
    ledger = Ledger(tmp_path / "node.jsonl", delta=1e-5)
    with ledger.release(plan, 1):
        pass
    words = str(Ledger.read(tmp_path / "node.jsonl").statement(1e-5))
    assert "is trusted." not in words
    # Alone it has no other noise to hide in: the server learns what its models show anybody.
    assert f"at z / sqrt(r), epsilon {ledger.epsilon():.4g}" in words


def test_a_loop_that_fails_in_a_round_has_spent_it_and_spends_it_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(ZeroDivisionError), Ledger(path).release(PLAN, 1):
        raise ZeroDivisionError
    again = Ledger(path)
    with again.release(PLAN, 1) as entry:
        assert entry.round == 1
    assert again.epsilon(1e-5) == pytest.approx(PLAN.epsilon(1e-5, after_round=2), rel=1e-9)


@pytest.mark.parametrize("sampler", [SeparatedCohort(5, 0.5, 100), CyclicCohort(5, 0.5, 100)])
def test_a_repeated_round_keeps_the_population(sampler, tmp_path: Path) -> None:
    plan = replace(PLAN, sampler=sampler)
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=0.01)
    for _ in range(2):
        with ledger.release(plan, 1):
            pass
    assert [entry.event.law.population for entry in ledger.entries] == [100, 100]
    assert "at least 1 / 100, the population" in str(Ledger.read(ledger.path).statement(0.01))


def test_a_budget_ends_the_loop_before_it_is_exceeded(tmp_path: Path) -> None:
    budget = PLAN.epsilon(1e-5, after_round=3) * 1.0001
    ledger, made = Ledger(tmp_path / "ledger.jsonl", delta=1e-5, max_epsilon=budget), []
    for number in range(1, 4):
        with ledger.release(PLAN, number):
            made.append(number)
    with pytest.raises(BudgetSpentError, match="max-epsilon") as e, ledger.release(PLAN, 4):
        made.append(4)
    assert str(e.value).endswith(f" in ledger {ledger.path}.")
    assert made == [1, 2, 3]
    assert ledger.epsilon() <= budget


def test_a_plan_whose_rounds_share_noise_is_charged_once_and_each_repetition_more() -> None:
    plan = ReleasePlan(
        level="client",
        sampler=CyclicCohort(groups=4, population=100),
        mechanism=DeclaredMechanism("clipping of theirs", clip_norm=1.0),
        noise=Banded(4.0),
        rounds=8,
    )
    ledger = Ledger(delta=1e-5)
    for number in range(1, 9):
        with ledger.release(plan, number):
            pass
    assert ledger.epsilon() == pytest.approx(plan.epsilon(1e-5), rel=1e-9)
    with ledger.release(plan, 8):
        pass
    assert ledger.epsilon() > plan.epsilon(1e-5)


def test_a_declared_bound_has_a_length() -> None:
    with pytest.raises(FedsimError, match=r"mechanism\.clip-norm"):
        DeclaredMechanism("of theirs", clip_norm=-1.0)


ALONE = """
import sys
from fedsim.cohorts import PoissonCohort
from fedsim.privacy import DeclaredMechanism, Independent, Ledger, ReleasePlan, calibrate
sampler = PoissonCohort(rate=0.1, population=1000)
z = calibrate(target_epsilon=2.0, cohort=sampler, rounds=10, delta=1e-5)
plan = ReleasePlan(
    level="client", sampler=sampler, mechanism=DeclaredMechanism("theirs", 1.0),
    noise=Independent(z), rounds=10,
)
ledger = Ledger(sys.argv[1], delta=1e-5)
for number in range(1, 11):
    with ledger.release(plan, number):
        pass
print(ledger.statement())
absent = {"torch", "flwr", "opacus", "pydantic", "ray", "matplotlib", "rich"}
assert not absent & set(sys.modules), absent & set(sys.modules)
"""
FIVE = ("numpy", "scipy", "dp-accounting", "annotated-types", "typing-extensions")


def test_the_core_loads_neither_torch_nor_flower(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.jsonl")
    ran = subprocess.run([sys.executable, "-c", ALONE, path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "(2, 1e-05)-differentially private" in ran.stdout


@pytest.mark.slow
def test_the_core_works_with_five_packages(tmp_path: Path) -> None:
    """In an environment that has them, what they need, and fedsim without its dependencies."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "alone"], check=True)
    python = str(tmp_path / "alone/bin/python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *FIVE], check=True)
    root = Path(__file__).parents[2]
    subprocess.run([*install, "--no-deps", str(root)], check=True)
    ran = subprocess.run(
        [python, "-c", ALONE, str(tmp_path / "ledger.jsonl")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert "(2, 1e-05)-differentially private" in ran.stdout

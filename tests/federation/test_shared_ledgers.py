"""Strategies that share a ledger, and may end early because of what they released."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixed_clients import Fixed

from fedsim.cohorts import PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record
from fedsim.federation.state_tree import Tree
from fedsim.mechanisms import Clipping
from fedsim.mechanisms.bounded_values import ValueRange
from fedsim.privacy import Accountant, Event, Ledger
from fedsim.privacy.claims import Stopping
from fedsim.strategies import ClientMetrics, DPFedAvg, PrivateMetrics

COHORT = PoissonCohort(0.5, 50)
EVENT = Event.of(COHORT, 5.0)
DELTA = 1e-4


def strategy_of(ledger: Ledger | Path, planned: int, **others: object) -> DPFedAvg:
    """A strategy whose releases may end it before its planned number of rounds."""
    return DPFedAvg(
        mechanism=Clipping(1.0),
        cohort=COHORT,
        noise_multiplier=5.0,
        delta=DELTA,
        ledger=ledger,
        stopping=Stopping(possible_ends=planned, rounds_left=planned),
        **others,
    )


def run(strategy: DPFedAvg, rounds: int, state: Tree | None = None) -> None:
    grid = LocalGrid(Fixed(torch.zeros(50, 3)))
    strategy.start(grid, array_record({"w": torch.zeros(3)}), num_rounds=rounds, state=state)


@pytest.mark.parametrize("seed", [None, 1])
def test_rounds_planned_and_not_made_stay_charged_in_a_shared_ledger(
    seed: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    run(strategy_of(path, 30, seed=seed), 5)
    assert Ledger(path).epsilon(DELTA) == Accountant([EVENT.times(30)]).epsilon(DELTA)
    # Another run, of equal settings where no seed tells them apart, is charged all of its own.
    second = strategy_of(path, 20, seed=None if seed is None else seed + 1)
    run(second, 20)
    assert Ledger(path).epsilon(DELTA) == Accountant([EVENT.times(50)]).epsilon(DELTA)
    assert second.privacy_spent().epsilon == Accountant([EVENT.times(50)]).epsilon(DELTA / 2)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_resumed_run_makes_its_planned_rounds_at_no_further_cost(
    seed: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    first = strategy_of(path, 30, seed=seed)
    run(first, 5)
    claimed, planned = first.privacy_spent().epsilon, Ledger(path).epsilon(DELTA)
    second = strategy_of(path, 30, seed=seed)
    run(second, 9, first.state())
    assert claimed < second.privacy_spent().epsilon < planned
    assert Ledger(path).epsilon(DELTA) == planned
    assert [entry.kind for entry in Ledger(path).entries].count("planned") == 1


def test_a_budget_limits_the_planned_rounds() -> None:
    ledger = Ledger()
    run(strategy_of(ledger, 30, max_epsilon=1.0, seed=1), 2)
    assert ledger.epsilon(DELTA / 2) <= 1.0
    assert sum(entry.event.count for entry in ledger.entries) > 2


def test_private_evaluations_are_part_of_the_plan() -> None:
    metrics = ClientMetrics(private=PrivateMetrics([ValueRange("loss", 0, 1)], 2.0), every=3)
    ledger = Ledger()
    strategy = strategy_of(ledger, 30, seed=1, metrics=metrics, fraction_evaluate=0.5)
    run(strategy, 1)
    evaluation = Event.of(COHORT, 2.0)
    expected = Accountant([EVENT.times(30), evaluation.times(10)])
    assert ledger.epsilon(DELTA) == expected.epsilon(DELTA)
    assert strategy.privacy_statement().planned.epsilon(DELTA) == expected.epsilon(DELTA)

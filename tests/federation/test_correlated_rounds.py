"""Rounds that share draws: resumed, made once more, over at their plan's end."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fixed_clients import Fixed
from flwr.app import ArrayRecord, ConfigRecord

from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record
from fedsim.mechanisms import AdaClip, Clipping
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.laws import Full
from fedsim.privacy.laws.cyclic import Cyclic
from fedsim.privacy.losses import gaussian_epsilon
from fedsim.privacy.noise import Independent, Noise
from fedsim.privacy.noise.banded import Banded
from fedsim.privacy.noise.blt import BLT
from fedsim.privacy.noise.lambda_cgd import LambdaCGD
from fedsim.privacy.noise.tree import Tree
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness
from fedsim.strategies import DPFedAvg

CLIENTS, D, ROUNDS, LAMBDA, Z = 8, 20_000, 8, 0.6, 3.0


def strategy_of(ledger: Path | None = None, seed: int | None = None, **plan: object) -> DPFedAvg:
    settings = {
        "sampler": Cyclic(2, population=CLIENTS),
        "mechanism": Clipping(1.0),
        "noise": LambdaCGD(Z, coefficients=str(LAMBDA)),
        "rounds": ROUNDS,
    }
    made = ReleasePlan(level="client", **(settings | plan))
    # One digest: plans that are compared at one seed are keyed alike.
    return DPFedAvg(plan=made, ledger=ledger, seed=Randomness(seed, "a digest"))


def releases(strategy: DPFedAvg, rounds: range) -> list[np.ndarray]:
    """What rounds add to the model, of clients whose updates are zero: the noise, over z."""
    found, arrays = [], array_record({"w": torch.zeros(D)})
    grid = LocalGrid(Fixed(torch.zeros(CLIENTS, D)))
    for server_round in rounds:
        before = arrays.to_numpy_ndarrays()[0]
        arrays = step(strategy, server_round, arrays, grid)
        moved = arrays.to_numpy_ndarrays()[0].astype(np.float64) - before
        found.append(moved * strategy.plan.denominator / Z)
    return found


def step(strategy: DPFedAvg, number: int, arrays: ArrayRecord, grid: LocalGrid) -> ArrayRecord:
    messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
    made, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
    assert made is not None
    return made


def test_later_noise_takes_earlier_away_also_in_a_run_that_was_resumed(tmp_path: Path) -> None:
    for seed in (None, 5):
        ledger = tmp_path / f"{seed}.jsonl"
        first = strategy_of(ledger, seed)
        noise = releases(first, range(1, 4))
        resumed = strategy_of(ledger, seed)
        resumed.restore(first.state())
        noise += releases(resumed, range(4, ROUNDS + 1))
        # Float32 parameters round the noise: draws are recovered to some 1e-6.
        draws = [noise[0]]
        for released in noise[1:]:
            draws.append(released + LAMBDA * draws[-1])
        correlations = np.corrcoef(draws)
        apart = correlations[~np.eye(ROUNDS, dtype=bool)]
        assert abs(apart).max() < 5 / math.sqrt(D)  # of 28 pairs
        assert np.std(draws, axis=1) == pytest.approx(np.ones(ROUNDS), abs=0.03)
        expected = -LAMBDA / (1 + LAMBDA**2)
        assert np.corrcoef(noise[2], noise[3])[0, 1] == pytest.approx(expected, abs=0.03)


def test_a_plan_is_charged_before_its_first_round_and_ends_with_its_last(tmp_path: Path) -> None:
    strategy = strategy_of(tmp_path / "ledger.jsonl", 1)
    releases(strategy, range(1, 2))
    sensitivity = strategy.plan.noise.sensitivity(strategy.plan.noise.known_participation)  # type: ignore[attr-defined]
    expected = gaussian_epsilon(sensitivity / Z, 1e-5)
    assert strategy.ledger.epsilon(1e-5) == pytest.approx(expected)
    releases(strategy, range(2, ROUNDS + 1))
    assert strategy.ledger.epsilon(1e-5) == pytest.approx(expected)
    assert [entry.event.count for entry in strategy.ledger.entries] == [1] + [0] * (ROUNDS - 1)
    assert "8 releases" in str(strategy.privacy_statement())
    # Nothing is secret that follows from the seed; what does not is gone with the last round.
    assert strategy.state()["noise"]["secrets"] == []
    drawn = strategy_of(tmp_path / "drawn.jsonl")
    releases(drawn, range(1, ROUNDS + 1))
    assert "noise" not in drawn.state()
    grid = LocalGrid(Fixed(torch.zeros(CLIENTS, D)))
    arrays = array_record({"w": torch.zeros(D)})
    assert list(strategy.configure_train(ROUNDS + 1, arrays, ConfigRecord(), grid)) == []
    assert "would follow a plan of 8 rounds" in (strategy.stopped or "")


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ({"noise": Independent(Z)}, {}, "do not share draws .* they must"),
        ({}, {"noise": Independent(Z)}, "rounds share draws .* they must not"),
        ({"seed": 5}, {}, "noise comes from the seed; .* from the operating system"),
        ({}, {"seed": 5}, "noise comes from the operating system; .* from the seed"),
    ],
)
def test_a_state_of_other_noise_is_refused_and_changes_nothing(before, after, sentence) -> None:
    first, other = strategy_of(**before), strategy_of(**after)
    releases(first, range(1, 4))
    noise = other.state().get("noise")
    with pytest.raises(FedsimError, match=sentence):
        other.restore(first.state())
    assert other.state().get("noise") == noise
    assert not other.ledger.entries


def test_the_secret_of_a_state_that_is_refused_is_not_taken() -> None:
    first, other = strategy_of(), strategy_of()
    releases(first, range(1, 4))
    noise = other.state()["noise"]
    with pytest.raises(FedsimError, match="state= is not"):
        other.restore({**first.state(), "failures": {}})
    assert other.state()["noise"] == noise


def test_a_round_that_is_made_once_more_costs_a_row_of_the_plan_more(tmp_path: Path) -> None:
    first = strategy_of(tmp_path / "ledger.jsonl")
    noise = releases(first, range(1, 4))
    state = first.state()
    lost = releases(first, range(4, 6))
    resumed = strategy_of(tmp_path / "ledger.jsonl")
    resumed.restore(state)
    plan = resumed.plan
    again = releases(resumed, range(4, 5))[0]
    extra = plan.charge(4, redrawn=True)
    assert extra.count == 1
    spent = Accountant([plan.charge(1), extra]).epsilon(1e-5)
    assert resumed.ledger.epsilon(1e-5) == pytest.approx(spent)
    assert spent > plan.epsilon(1e-5)
    # Both take the same third round's draws away, and share none of their own.
    last = noise[0]
    for released in noise[1:]:
        last = released + LAMBDA * last
    own = [released + LAMBDA * last for released in (lost[0], again)]
    assert abs(np.corrcoef([last, *own])[~np.eye(3, dtype=bool)]).max() < 5 / math.sqrt(D)
    releases(resumed, range(5, 6))
    both = Accountant([plan.charge(1), extra, extra]).epsilon(1e-5)
    assert resumed.ledger.epsilon(1e-5) == pytest.approx(both)
    third = strategy_of(tmp_path / "ledger.jsonl")
    third.restore(resumed.state())
    releases(third, range(6, ROUNDS + 1))
    assert third.ledger.epsilon(1e-5) == pytest.approx(both)


@pytest.mark.parametrize(
    "noise", [LambdaCGD(Z), Banded(Z, bands=2), BLT(Z), Tree(Z)], ids=lambda noise: noise.name
)
def test_a_round_without_replies_is_a_round_of_zeros(tmp_path: Path, noise: Noise) -> None:
    grid = LocalGrid(Fixed(torch.zeros(CLIENTS, D)))
    ends, spent = [], []
    for lost in (None, 3):
        strategy = strategy_of(tmp_path / f"{lost}.jsonl", 5, noise=noise)
        arrays = array_record({"w": torch.zeros(D)})
        for number in range(1, ROUNDS + 1):
            asked = strategy.configure_train(number, arrays, ConfigRecord(), grid)
            replies = grid.send_and_receive(asked)
            made, _ = strategy.aggregate_train(number, [] if number == lost else replies)
            assert made is not None
            arrays = made
        ends.append(arrays.to_numpy_ndarrays()[0])
        spent.append(strategy.ledger.epsilon(1e-5))
    # Noise was added, and taken away, in the lost round as in any other.
    assert np.array_equal(*ends)
    assert spent[0] == spent[1]


def test_the_secret_of_a_plan_is_in_its_state_alone(tmp_path: Path) -> None:
    strategy = strategy_of(tmp_path / "ledger.jsonl")
    releases(strategy, range(1, 3))
    ((first, secret),) = strategy.state()["noise"]["secrets"]
    assert (first, len(secret)) == (1, 64)
    assert secret not in (tmp_path / "ledger.jsonl").read_text()
    assert secret not in str(strategy.privacy_statement())
    assert strategy_of(tmp_path / "other.jsonl").state()["noise"]["secrets"] != [[1, secret]]
    assert strategy_of(seed=3).state()["noise"]["secrets"] == []
    # Each strategy that continues it draws under a fresh one.
    resumed = [strategy_of(tmp_path / "ledger.jsonl") for _ in range(2)]
    for one in resumed:
        one.restore(strategy.state())
    fresh = [one.state()["noise"]["secrets"] for one in resumed]
    assert fresh[0][0] == fresh[1][0] == [1, secret]
    assert [pairs[1][0] for pairs in fresh] == [3, 3]
    assert fresh[0][1] != fresh[1][1]


@pytest.mark.parametrize("noise", [Independent(Z), LambdaCGD(Z, coefficients="0")])
def test_noise_with_lambda_zero_is_independent_noise_to_the_bit(noise: Noise) -> None:
    expected = strategy_of(seed=4, noise=Independent(Z))
    found = strategy_of(seed=4, noise=noise)
    for one, other in zip(*(releases(s, range(1, 4)) for s in (expected, found)), strict=True):
        assert np.array_equal(one, other)


def test_plans_that_cannot_share_draws_are_refused() -> None:
    with pytest.raises(FedsimError, match="no number of rounds"):
        strategy_of(rounds=None)
    with pytest.raises(FedsimError, match="at example level it must be independent"):
        ReleasePlan(
            level="example", sampler=Full(9), mechanism=Clipping(1.0), noise=Banded(1.0), rounds=3
        )
    with pytest.raises(FedsimError, match="correlated over rounds"):
        strategy_of(mechanism=AdaClip()).check(array_record({"w": torch.zeros(3)}))
    with pytest.raises(FedsimError, match="must be lambda, a number from 0"):
        strategy_of(noise=LambdaCGD(1.0, coefficients="1.5"))

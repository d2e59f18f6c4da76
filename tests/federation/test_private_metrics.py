"""Evaluations by clients as releases: what they say, what they cost, when a budget ends them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixed_clients import Fixed
from flwr.app import ConfigRecord, MetricRecord

import fedsim
from fedsim import RunConfig
from fedsim.cohorts import Cohort, FixedCohort, FullCohort, PoissonCohort
from fedsim.config.plan import evaluation_event
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record
from fedsim.mechanisms import Clipping, NoPrivacy
from fedsim.mechanisms.bounded_values import ValueRange
from fedsim.privacy import Accountant, Event, Ledger
from fedsim.privacy.laws import PoissonLaw
from fedsim.rows.block import Block
from fedsim.strategies import Availability, ClientMetrics, ClientTraining, DPFedAvg, PrivateMetrics

CLIENTS = 400
ACCURACY = [ValueRange("accuracy", 0.0, 1.0)]


class Scored(Fixed):
    """Clients whose accuracies are known; every tenth has no examples."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.zeros(CLIENTS, 3))
        self.accuracies = np.random.default_rng(seed).beta(5, 2, CLIENTS)
        self.examples = np.where(np.arange(CLIENTS) % 10 == 0, 0.0, 7.0)
        self.asked: list[np.ndarray] = []

    def evaluate(self, vector, client_ids, round) -> Iterator[Block]:
        self.asked.append(client_ids)
        metrics = {
            "num-examples": self.examples,
            "accuracy": self.accuracies,
            "secret": self.examples,
        }
        yield Block.sent(client_ids, None, {k: v[client_ids] for k, v in metrics.items()})


def strategy_of(
    ledger: Path | None = None,
    cohort: Cohort | None = None,
    ranges: list[ValueRange] | None = None,
    z: float = 2.0,
    every: int = 1,
    **others: object,
) -> DPFedAvg:
    settings = {
        "fraction_evaluate": 1.0,
        "seed": 3,
        "mechanism": Clipping(1.0),
        "noise_multiplier": 5.0,
    } | others
    return DPFedAvg(
        cohort=cohort or PoissonCohort(0.5, CLIENTS),
        metrics=ClientMetrics(private=PrivateMetrics(ranges or ACCURACY, z), every=every),
        ledger=ledger,
        **settings,
    )


def run(strategy: DPFedAvg, clients: Scored, rounds: int = 3) -> dict[int, MetricRecord]:
    arrays = array_record({"w": torch.zeros(3)})
    result = strategy.start(LocalGrid(clients), arrays, rounds)
    return result.evaluate_metrics_clientapp


def test_a_metric_that_no_client_reports_is_named_once_and_charged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = tmp_path / "ledger.jsonl"
    misnamed = [ValueRange("acc", 0.0, 1.0)]
    run(strategy_of(ledger, ranges=misnamed), Scored(), rounds=2)
    assert sum(entry.kind == "evaluation" for entry in Ledger.read(ledger).entries) == 2
    told = [m for m in caplog.messages if "no client reports" in m]
    assert len(told) == 1
    assert "no client reports acc," in told[0]
    assert "replies have accuracy, num-examples, secret." in told[0]


def test_metrics_that_clients_report_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    run(strategy_of(), Scored(), rounds=1)
    assert "no client reports" not in caplog.text


@pytest.mark.slow
def test_an_evaluation_is_the_mean_over_clients_with_noise_and_has_a_line(tmp_path: Path) -> None:
    clients, z = Scored(), 3.0
    there = clients.accuracies[clients.examples > 0]
    found = []
    for seed in range(60):
        path = tmp_path / f"{seed}.jsonl"
        metrics = run(strategy_of(path, z=z, seed=seed), clients)
        assert metrics.keys() == {1, 2, 3}
        # What has no range is not released: neither other metrics nor numbers of examples.
        assert all(record.keys() == {"accuracy"} for record in metrics.values())
        found += [record["accuracy"] for record in metrics.values()]
    lines = Ledger.read(path).entries
    assert [line.kind for line in lines] == ["release", "evaluation"] * 3
    assert [line.round for line in lines] == [1, 1, 2, 2, 3, 3]
    expected = ACCURACY[0].mean_error(there.mean(), z, len(there))
    assert np.mean(found) == pytest.approx(there.mean(), abs=4 * expected / math.sqrt(len(found)))
    # The deviation of a deviation is 5 % of it.
    assert np.std(found) == pytest.approx(expected, rel=0.2)
    assert len({round(value, 9) for value in found}) == len(found)


def test_a_client_of_weight_0_has_no_part_in_an_evaluation_whatever_the_weights_are_called() -> (
    None
):
    class Renamed(Scored):
        def evaluate(self, vector, client_ids, round) -> Iterator[Block]:
            for block in super().evaluate(vector, client_ids, round):
                yield replace(
                    block, metrics={**block.metrics, "num-examples": np.ones(len(block.ok))}
                )

    clients = Renamed()
    settings = {"cohort": FullCohort(CLIENTS), "z": 1e-6, "weighted_by_key": "secret"}
    (found,) = run(strategy_of(**settings), clients, rounds=1).values()
    expected = clients.accuracies[clients.examples > 0].mean()
    assert found["accuracy"] == pytest.approx(expected, abs=1e-4)
    assert clients.accuracies.mean() != pytest.approx(expected, abs=1e-4)


def test_the_ledger_charges_evaluations_at_the_rate_of_their_own_samples(tmp_path: Path) -> None:
    clients, path = Scored(), tmp_path / "ledger.jsonl"
    run(strategy_of(path, fraction_evaluate=0.25, every=2), clients, rounds=8)
    law = PoissonLaw(rate=0.5, population=CLIENTS)
    cohorts = Event(noise_multiplier=5.0, law=law).times(8)
    evaluations = Event(noise_multiplier=2.0, law=PoissonLaw(rate=0.25, population=CLIENTS)).times(
        4
    )
    expected = Accountant([cohorts, evaluations]).epsilon(1e-5)
    assert Ledger.read(path).epsilon(1e-5) == pytest.approx(expected, rel=1e-9)
    sizes = [len(asked) for asked in clients.asked]
    assert len(sizes) == 4
    assert 100 - 5 * 9 < min(sizes) <= max(sizes) < 100 + 5 * 9
    assert len({asked.tobytes() for asked in clients.asked}) == 4


@pytest.mark.parametrize(
    ("cohort", "fraction", "name"),
    [
        (FixedCohort(10, CLIENTS), 1.0, "full"),
        (FixedCohort(10, CLIENTS), 0.1, "fixed"),
        (FullCohort(CLIENTS), 1.0, "poisson"),
        (FullCohort(CLIENTS), 0.5, "poisson"),
    ],
)
def test_an_evaluation_has_the_neighbours_of_the_rounds(
    cohort: Cohort, fraction: float, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    run(strategy_of(path, cohort, fraction_evaluate=fraction), Scored())
    ledger = Ledger.read(path)
    assert {line.event.adjacency for line in ledger.entries} == {cohort.adjacency}
    assert {e.event.law.name for e in ledger.entries if e.kind == "evaluation"} == {name}
    assert ledger.cost(1e-5).adjacency == cohort.adjacency


def test_noise_alone_is_released_where_nobody_was_drawn(tmp_path: Path) -> None:
    path, clients = tmp_path / "ledger.jsonl", Scored()
    strategy = strategy_of(path, fraction_evaluate=1e-6, ranges=[ValueRange("accuracy", 0, 1)])
    run(strategy, clients, rounds=4)
    assert [line.kind for line in Ledger.read(path).entries] == ["release", "evaluation"] * 4


def test_an_evaluation_that_a_budget_does_not_allow_ends_the_run(tmp_path: Path) -> None:
    law = PoissonLaw(rate=0.5, population=CLIENTS)
    two = [Event(noise_multiplier=5.0, law=law).times(2), Event(noise_multiplier=2.0).times(1)]
    budget, path = Accountant(two).epsilon(1e-5) * 1.001, tmp_path / "ledger.jsonl"
    strategy, clients = strategy_of(path, max_epsilon=budget), Scored()
    metrics = run(strategy, clients, rounds=9)
    assert [line.kind for line in Ledger.read(path).entries] == ["release", "evaluation", "release"]
    assert metrics.keys() == {1}
    assert "the evaluation of round 2 would exceed max-epsilon" in (strategy.stopped or "")
    assert len(clients.asked) == 1
    assert Ledger.read(path).epsilon(1e-5) <= budget


def test_other_settings_of_an_evaluation_have_other_noise() -> None:
    clients = Scored()
    quantiles = [ValueRange("accuracy", 0.0, 1.0, quantiles=True)]
    wider = [ValueRange("accuracy", 0.0, 2.0)]
    seen = [
        run(strategy_of(ranges=ranges, z=z), clients, 1)[1]["accuracy"]
        for ranges, z in ((ACCURACY, 2.0), (ACCURACY, 4.0), (quantiles, 2.0), (wider, 2.0))
    ]
    exact = clients.accuracies[clients.examples > 0].mean()
    moves = [(value - exact) / scale for value, scale in zip(seen, (1, 2, 2**0.5, 1), strict=True)]
    assert all(abs(a - b) > 1e-6 for i, a in enumerate(moves) for b in moves[:i])
    # Two sums that differ in a range or metric would reveal each other under the same noise.
    renamed = [ValueRange("loss", 0.0, 1.0)]
    others = [strategy_of(ranges=ranges) for ranges in (ACCURACY, wider, renamed)]
    # So would two sums over other clients.
    absent = Availability(reachable=lambda _, client_ids: client_ids > 0)
    others.append(strategy_of(availability=absent))
    releases = [strategy.evaluation.metrics_sum(1).release() for strategy in others]
    assert len({release.tobytes() for release in releases}) == 4
    # And the rounds' own does not depend on them.
    assert run(strategy_of(), clients, 1)[1] == run(strategy_of(), clients, 1)[1]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"mechanism": NoPrivacy(), "noise_multiplier": 0.0}, "without client-level privacy"),
        ({"placement": "client"}, "clients send their shares"),
        ({"clients": ClientTraining(private_examples=True)}, "the server would see metrics"),
        ({"evaluate_metrics_aggr_fn": lambda records, key: MetricRecord()}, "aggr_fn"),
    ],
)
def test_private_metrics_are_refused_where_they_would_not_be(
    others: dict[str, object], words: str
) -> None:
    with pytest.raises(FedsimError, match=words):
        strategy_of(**others)


CONFIG = RunConfig.parse(
    {
        "rounds": 12,
        "partition": {"clients": 20},
        "cohort": {"name": "poisson", "rate": 0.5},
        "mechanism": {"name": "clipping"},
        "noise": {"target-epsilon": 6.0},
        "evaluate": {"clients-every": 5, "private": True, "target-share": 0.2},
    }
)


@pytest.mark.parametrize("seed", [3, None])
def test_an_evaluation_is_released_once(seed: int | None) -> None:
    strategy, arrays = strategy_of(seed=seed), array_record({"w": torch.zeros(3)})

    def evaluate(number: int, clients: Scored) -> None:
        grid = LocalGrid(clients)
        messages = strategy.configure_evaluate(number, arrays, ConfigRecord(), grid)
        strategy.aggregate_evaluate(number, grid.send_and_receive(messages))

    evaluate(1, Scored())
    for number in (1, 0):
        with pytest.raises(ValueError, match=f"evaluation of round {number} cannot follow that of"):
            evaluate(number, Scored(seed=1))
    evaluate(2, Scored(seed=1))
    assert [(line.kind, line.round) for line in strategy.ledger.entries] == [
        ("evaluation", 1),
        ("evaluation", 2),
    ]


def test_an_evaluation_that_is_resumed_is_released_once(tmp_path: Path) -> None:
    path, arrays, states = tmp_path / "ledger.jsonl", array_record({"w": torch.zeros(3)}), []
    first = strategy_of(path)
    grid = LocalGrid(Scored())
    first.start(grid, arrays, 2, on_round=lambda *_: states.append((first.state(), first.result)))
    state, result = states[0]
    assert result is not None
    again = strategy_of(path)
    again.start(grid, result.arrays, 2, state=state)
    assert len(again.ledger.entries) == 4
    other = strategy_of(path)
    other.restore(state)
    with pytest.raises(ValueError, match="evaluation of round 1 cannot follow"):
        other.configure_evaluate(1, arrays, ConfigRecord(), grid)


def test_a_target_is_of_rounds_and_evaluations_together() -> None:
    event = evaluation_event(CONFIG)
    assert event is not None
    # Two of 12 rounds have one; they alone cost their share.
    assert Accountant([event.times(2)]).epsilon(1e-5) == pytest.approx(1.2, rel=1e-3)
    result = fedsim.run(CONFIG)
    (statement,) = result.statements
    assert 6.0 * (1 - 1e-3) <= statement.epsilon <= 6.0
    evaluated = [row["round"] for row in result.metrics if "clients-accuracy" in row]
    assert evaluated == [5, 10]
    assert "clients-loss" not in result.metrics[5]
    assert "with the noisy metrics of clients' evaluations (accuracy) is (" in str(statement)


def test_a_released_metric_stops_a_run() -> None:
    settings = {"evaluate.clients-every": 1, "stop.metric": "clients-accuracy", "client.lr": 1e-9}
    result = fedsim.run(CONFIG.replace(**settings, **{"stop.patience": 1}))
    # A round whose noise is too large for any metric has none.
    accuracies = [row["clients-accuracy"] for row in result.metrics if "clients-accuracy" in row]
    # It stops at the first evaluation that is not better than the one before.
    worse = [k for k in range(1, len(accuracies)) if accuracies[k] <= accuracies[k - 1]]
    assert result.ended == "stopped"
    assert worse == [len(accuracies) - 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluate.private": False}, "or at client level evaluate.private = true"),
        ({"evaluate.clients-every": 0}, "evaluate.private = true; it must be false unless"),
        ({"evaluate.clients-every": 13}, "from 1 to rounds = 12"),
        ({"evaluate.unprotected": True}, "while evaluate.unprotected = true"),
        ({"noise.placement": "client"}, "clients send their shares and nothing else"),
        ({"noise.target-epsilon": "", "noise.multiplier": 1.0}, "evaluate.multiplier = ''"),
        ({"evaluate.multiplier": 0.0}, "evaluate.multiplier = 0.0; it must be above 0"),
        ({"evaluate.ranges": "loss(5,0)"}, "the smaller number first"),
        ({"evaluate.ranges": "loss"}, "names with their ranges"),
        ({"evaluate.ranges": "loss(0,inf)"}, "names with their ranges"),
        ({"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}, "protect their"),
    ],
)
def test_configs_say_what_private_evaluations_need(changes: dict[str, object], words: str) -> None:
    with pytest.raises(FedsimError, match=words.replace("(", r"\(")):
        CONFIG.replace(**changes)


def test_a_range_is_of_a_metric_that_there_is() -> None:
    config = CONFIG.replace(**{"evaluate.ranges": "recall(0,1)"})
    with pytest.raises(FedsimError, match=r"evaluate\.ranges has 'recall'; it must be of loss"):
        fedsim.run(config)
    alone = CONFIG.replace(**{"task.metrics": ""})
    with pytest.raises(FedsimError, match="it must give at least one, such as"):
        fedsim.run(alone)


def test_written_ranges_are_evenly_spaced() -> None:
    config = CONFIG.replace(**{"evaluate.ranges": "loss( 0 , 5.0 ),accuracy(0.5,1)"})
    assert config.evaluate.ranges == "loss(0,5), accuracy(0.5,1)"
    assert RunConfig.from_run_config(config.to_run_config()) == config

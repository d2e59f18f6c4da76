"""Beside Flower's own: what its users give, read and see."""

from __future__ import annotations

import logging

import pytest
import torch
from fixed_clients import Fixed
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record
from fedsim.mechanisms import Clipping, NoPrivacy
from fedsim.strategies import DPFedAvg

INITIAL = array_record({"w": torch.zeros(2)})


def strategy(clients: int = 4, **settings) -> DPFedAvg:
    return DPFedAvg(
        **{
            "mechanism": Clipping(1.0),
            "cohort": FullCohort(clients),
            "noise_multiplier": 1.0,
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"fraction_train": 0.1}, r"fraction_train = 0\.1 .* use cohort=PoissonCohort\(rate="),
        ({"min_train_nodes": 2}, r"use cohort=FixedCohort\(size=min_train_nodes"),
        ({"clipping_norm": 1.0}, r"use mechanism=Clipping\(clip_norm=clipping_norm\)"),
        ({"server_momentum": 0.9}, r"use server_optimizer=sgd\("),
    ],
)
def test_flowers_keywords_that_mean_something_else_are_refused_with_the_one_to_use(given, instead):
    with pytest.raises(FedsimError, match=instead):
        strategy(**given)
    with pytest.raises(FedsimError, match="DPFedAvg has no argument 'clip'; it takes plan,"):
        strategy(clip=1.0)


@pytest.mark.parametrize("name", ["bn.running_mean", "bn/moving_variance", "running_var"])
def test_running_statistics_are_refused_in_a_private_run(name):
    initial = array_record({"w": torch.zeros(2), name: torch.ones(2)})
    grid = LocalGrid(Fixed(torch.ones(4, 4)))
    private = strategy()
    with pytest.raises(FedsimError, match=f"'{name}' is a running statistic"):
        private.start(grid, initial, 1)
    assert not private.ledger.entries
    strategy(noise_multiplier=0.0).start(grid, initial, 1)


def test_parameters_with_the_names_of_clients_vectors_are_refused():
    """Such a run could not be resumed with momentum, and SCAFFOLD took them for its variates."""
    initial = array_record({"client/w": torch.zeros(2)})
    with pytest.raises(FedsimError, match="'client/w' begins with 'client/', as vectors do"):
        strategy().start(LocalGrid(Fixed(torch.ones(4, 2))), initial, 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16])
def test_parameters_that_would_stay_untrained_or_fail_every_client_are_refused(dtype):
    initial = array_record({"w": torch.zeros(2), "spectrum": torch.ones(2, dtype=dtype)})
    refused = strategy()
    with pytest.raises(FedsimError, match=f"'spectrum' is {dtype}; parameters must be one of"):
        refused.start(LocalGrid(Fixed(torch.ones(4, 4))), initial, 1)
    assert not refused.ledger.entries


def test_a_population_that_differs_from_the_nodes_there_is_said(caplog):
    with caplog.at_level(logging.WARNING, logger="fedsim"):
        strategy(10).start(LocalGrid(Fixed(torch.ones(4, 2))), INITIAL, 3)
    said = (
        "4 of the population's 10 clients are available; the others are sampled too, and count as"
    )
    assert caplog.text.count(said) == 1


def test_clients_beyond_the_population_that_come_later_have_no_part():
    class Growing(LocalGrid):
        nodes = 4

        def client_ids(self) -> dict[int, int]:
            return {k: node for k, node in super().client_ids().items() if k < self.nodes}

    grid = Growing(Fixed(torch.ones(9, 2)))
    private = strategy(4)
    private.start(grid, INITIAL, 3, on_round=lambda t, _: setattr(grid, "nodes", 9))
    assert private.report is not None
    assert (private.report.round, private.report.asked, private.report.usable) == (3, 4, 4)


def test_each_round_and_its_epsilon_stand_in_flowers_log(caplog):
    grid = LocalGrid(Fixed(torch.ones(4, 2), failing=(1,)))
    with caplog.at_level(logging.INFO, logger="flwr"):
        made = strategy(cohort=PoissonCohort(1.0, 4), seed=1)
        made.start(grid, INITIAL, 2, evaluate_fn=lambda t, _: MetricRecord({"accuracy": 0.25 * t}))
    lines = [record.message for record in caplog.records if record.name == "flwr"]
    assert lines[:2] == ["Starting DPFedAvg strategy:", "\t├──> Number of rounds: 2"]
    assert [line for line in lines if "ROUND" in line] == ["[ROUND 1/2]", "[ROUND 2/2]"]
    assert "aggregate_train: 3 of 4 clients drawn are usable (raised 1)" in lines
    epsilon = made.privacy_spent().epsilon
    spent = f"epsilon (simulated) {epsilon:.4g} at delta 1e-05 (client level, add-remove)"
    assert f"\t└──> {spent}" in lines
    assert "\t└──> MetricRecord: {'accuracy': 0.5}" in lines


def test_an_observer_that_raises_ends_no_run_and_is_said_once(caplog):
    def fail(server_round: int, result: object) -> None:
        raise KeyError("no such panel")

    made = strategy()
    made.start(LocalGrid(Fixed(torch.ones(4, 2))), INITIAL, 3, on_round=fail)
    assert made.rounds_done == 3
    assert caplog.text.count("on_round failed; the run continues.") == 1


def test_replies_to_an_evaluation_of_a_subclass_are_not_left_out_silently(caplog):
    class Everybody(DPFedAvg):
        def configure_evaluate(self, server_round, arrays, config, grid):
            content = RecordDict({"arrays": arrays})
            return [Message(content, node, "evaluate") for node in grid.get_node_ids()]

    everybody = Everybody(mechanism=NoPrivacy("uniform"), cohort=FullCohort(2))
    with caplog.at_level(logging.WARNING, logger="fedsim"):
        everybody.start(LocalGrid(ClientApp(), num_nodes=2), INITIAL, 1)
    assert "replies to an evaluation that this strategy did not configure" in caplog.text

"""Example counts weigh in a run with private examples only as they were declared."""

from __future__ import annotations

import pytest
import torch
from fixed_clients import Fixed
from flwr.app import ConfigRecord

from fedsim import RunConfig
from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.engines.client_app import client_app
from fedsim.mechanisms import NoPrivacy
from fedsim.rows.block import DECLARED_EXAMPLES
from fedsim.runs.resolve import Resolved, make_strategy, resolve
from fedsim.runs.runner import drive
from fedsim.strategies import ClientTraining, DPFedAvg
from fedsim.training import ClientData

UPDATES = torch.tensor([[1.0], [5.0]])


def moved(reported: list[int], **settings: object) -> float:
    strategy = DPFedAvg(
        mechanism=NoPrivacy(weighting="num-examples"),
        cohort=FullCohort(2),
        **settings,
    )
    trainer = Fixed(UPDATES, examples=reported)
    result = strategy.start(LocalGrid(trainer), array_record({"w": torch.zeros(1)}), 1)
    return tensors(result.arrays)["w"].item()


def test_declared_counts_weigh_whatever_clients_report() -> None:
    assert moved([1, 1]) == pytest.approx(3.0)
    for reported in ([1, 1], [1, 1000], [0, 7]):
        weighed = moved(
            reported, clients=ClientTraining(private_examples=True, example_counts=[3, 1])
        )
        assert weighed == pytest.approx(2.0)


def test_counts_that_clients_report_do_not_weigh_private_examples() -> None:
    with pytest.raises(FedsimError, match="declare the counts, which are then public"):
        moved([1, 1], clients=ClientTraining(private_examples=True))


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [1, -1]])
def test_a_count_is_declared_for_every_client(counts: list[int]) -> None:
    with pytest.raises(FedsimError, match="one, 0 or more, for each of the 2 clients"):
        moved([1, 1], clients=ClientTraining(private_examples=True, example_counts=counts))


def test_a_config_declares_the_sizes_of_its_partition() -> None:
    config = RunConfig().replace(
        **{
            "partition.clients": 9,
            "cohort.name": "full",
            "client.mechanism.name": "clipping",
            "client.noise.multiplier": 1.0,
        }
    )
    resolved = resolve(config)
    declared = declared_in_messages(resolved)
    assert declared == [len(part) for part in resolved.data.client_indices]
    uniform = resolve(config.replace(**{"mechanism.weighting": "uniform"}))
    assert declared_in_messages(uniform) == [None] * 9


def declared_in_messages(resolved: Resolved) -> list[object]:
    """What the messages of a round with all clients declare of their examples."""
    grid = LocalGrid(resolved.trainer)
    messages = make_strategy(resolved).configure_train(
        1, resolved.initial_arrays, ConfigRecord(), grid
    )
    return [m.content.config_records["config"].get(DECLARED_EXAMPLES) for m in messages]


def test_a_node_whose_own_data_are_not_what_is_declared_of_it_refuses(caplog) -> None:
    config = RunConfig().replace(
        **{
            "rounds": 1,
            "partition.clients": 4,
            "client.batch-size": 41,
            "client.mechanism.name": "clipping",
            "client.noise.multiplier": 1.0,
            "evaluate.every": 0,
        }
    )
    server = resolve(config.replace(**{"engine.name": "simulation"}))
    # Client 2's file has one example less than the partition has.
    data = server.trainer.data
    indices = [ids[: len(ids) - (client == 2)] for client, ids in enumerate(data.indices)]
    nodes = server.trainer_for(ClientData(data.x, data.y, indices))
    grid = LocalGrid(client_app(lambda _: nodes), num_nodes=4)
    result = drive(server, grid)
    (row,) = result.metrics
    assert (row["usable"], row["failed-raised"]) == (3, 1)
    size = len(indices[2])
    assert f"this client has {size} examples, but {size + 1} are declared for it" in caplog.text
    # What a client was asked for is charged before it answers, or does not.
    assert sorted(server.trainer.ledger.histories) == [0, 1, 2, 3]
    assert sorted(nodes.ledger.histories) == [0, 1, 3]
    # Weighed alike, nothing is declared, and a node's data are its own affair.
    uniform = resolve(server.config.replace(**{"mechanism.weighting": "uniform"}))
    assert drive(uniform, grid).metrics[0]["usable"] == 4

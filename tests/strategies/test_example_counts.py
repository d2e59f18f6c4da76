"""Example counts weigh in a run with private examples only as they were declared."""

from __future__ import annotations

import pytest
import torch
from fixed_clients import Fixed

from fedsim import RunConfig
from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid
from fedsim.engines.arrays import array_record, tensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import NoPrivacy
from fedsim.runs.build import Build
from fedsim.strategies import DPFedAvg

UPDATES = torch.tensor([[1.0], [5.0]])


def moved(reported: list[int], **settings: object) -> float:
    strategy = DPFedAvg(
        mechanism=NoPrivacy(weighting="num-examples"),
        cohort=FullCohort(2),
        **settings,  # type: ignore[arg-type]
    )
    trainer = Fixed(UPDATES, examples=reported)
    result = strategy.start(LocalGrid(trainer), array_record({"w": torch.zeros(1)}), 1)
    return tensors(result.arrays)["w"].item()


def test_declared_counts_weigh_whatever_clients_report() -> None:
    assert moved([1, 1]) == pytest.approx(3.0)
    for reported in ([1, 1], [1, 1000], [0, 7]):
        weighed = moved(reported, private_examples=True, example_counts=[3, 1])
        assert weighed == pytest.approx(2.0)


def test_counts_that_clients_report_do_not_weigh_private_examples() -> None:
    with pytest.raises(FedsimError, match="declare the counts, which are then public"):
        moved([1, 1], private_examples=True)


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [1, -1]])
def test_a_count_is_declared_for_every_client(counts: list[int]) -> None:
    with pytest.raises(FedsimError, match="one, 0 or more, for each of the 2 clients"):
        moved([1, 1], private_examples=True, example_counts=counts)


def test_a_config_declares_the_sizes_of_its_partition() -> None:
    config = RunConfig().replace(
        **{
            "partition.clients": 9,
            "client.mechanism.name": "clipping",
            "client.noise.multiplier": 1.0,
        }
    )
    build = Build(config)
    declared = build.strategy()._contributions.example_counts
    assert declared is not None
    assert declared.tolist() == [len(part) for part in build.parts]
    uniform = Build(config.replace(**{"mechanism.weighting": "uniform"})).strategy()
    assert uniform._contributions.example_counts is None

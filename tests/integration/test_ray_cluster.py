"""RayGrid over several Ray nodes, emulated on one machine: bytes, a node that is lost, traffic."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedsim.cohorts import FixedCohort
from fedsim.engines import LocalGrid, RayGrid, array_record
from fedsim.mechanisms import Clipping
from fedsim.rows.block import Block, BlockTrainer
from fedsim.strategies import DPFedAvg

pytestmark = pytest.mark.slow

D = 100_000


@dataclass
class Waves(BlockTrainer):
    """Client k sends a vector of its own."""

    population: int = 60

    def train(self, vector, client_ids, round):
        for start in range(0, len(client_ids), 5):
            ids = client_ids[start : start + 5]
            rows = torch.stack([torch.sin(vector * (k + 1) + round) for k in ids.tolist()])
            yield Block.sent(ids, rows, {"num-examples": np.ones(len(ids))})

    evaluate = train


@pytest.fixture
def cluster():
    ray = pytest.importorskip("ray")
    import ray.cloudpickle as cloudpickle
    from ray.cluster_utils import Cluster

    # Test classes are no package that workers could import.
    cloudpickle.register_pickle_by_value(__import__(__name__))
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()


def run(grid, on_round=None):
    strategy = DPFedAvg(
        mechanism=Clipping(0.5), cohort=FixedCohort(40, 60), noise_multiplier=1.0, seed=1
    )
    initial = array_record({"w": torch.linspace(0, 1, D)})
    usable = []

    def note(number, result):
        usable.append(strategy.report.usable)
        if on_round is not None:
            on_round(number)

    result = strategy.start(grid, initial, 4, on_round=note)
    return hashlib.sha256(result.arrays["w"].numpy().tobytes()).hexdigest(), usable


def test_nodes_of_a_cluster_give_the_bytes_of_one_process_also_when_one_is_lost(cluster):
    machines, nodes = cluster
    expected = run(LocalGrid(Waves()))
    assert expected[1] == [40] * 4

    def lose(number):
        if number == 2:
            machines.remove_node(nodes.pop(), allow_graceful=False)

    with RayGrid(Waves(), workers=3, address=machines.address, cpus_per_worker=0.5) as grid:
        assert run(grid, on_round=lose) == expected

"""Ray workers with a GPU each, in a Ray that believes that this machine has two."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from fedsim.engines import array_record
from fedsim.errors import FedsimError
from fedsim.federation.engines import ray as engine
from fedsim.federation.engines.ray import RayGrid, RayWorker, RayWorkerPool
from fedsim.federation.exchange import Instructions, Recipients
from fedsim.rows import Layout
from fedsim.rows.block import Block, BlockTrainer

CUDA = torch.device("cuda")


@dataclass
class Cards(BlockTrainer):
    """Clients that send the number of the GPU that their worker has, and how many came along."""

    population: int = 12
    device: torch.device = CUDA
    whole_block: int = 6

    def train(self, vector, client_ids, round):
        card = float(os.environ["CUDA_VISIBLE_DEVICES"])
        rows = torch.tensor([card, len(client_ids)]).repeat(len(client_ids), 1)
        yield Block.sent(client_ids, rows, {"num-examples": client_ids + 1.0})

    evaluate = train


def on_the_host(pool):
    """As `RayWorkerPool.new_worker`, with a GPU that is reserved and not used."""
    import ray

    actor = ray.remote(engine.TrainingActor).options(**pool._options)
    return RayWorker(actor.remote(pool._trainer, "cpu", pool._path))


@pytest.mark.slow
def test_each_worker_has_a_card_of_its_own_and_blocks_are_whole(monkeypatch):
    ray = pytest.importorskip("ray")
    import ray.cloudpickle as cloudpickle

    cloudpickle.register_pickle_by_value(__import__(__name__))
    monkeypatch.setattr(RayWorkerPool, "new_worker", on_the_host)

    def start(address, workers):
        ray.init(
            address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False
        )
        return True

    monkeypatch.setattr(engine, "_start_ray", start)
    vector, ids = torch.zeros(2), np.arange(12)
    asked = Instructions(
        message_type="train",
        round=1,
        arrays=array_record({"w": vector}),
        vector=vector,
        recipients=Recipients(ids, (ids + 2).astype(np.uint64)),
        config=ConfigRecord({"server-round": 1}),
        layout=Layout.of({"w": vector}),
    )
    with RayGrid(Cards()) as grid:
        assert len(grid._pool.workers) == 2
        blocks = list(grid.send_and_receive(asked).blocks())
    assert not ray.is_initialized()
    rows = torch.cat([block.rows for block in blocks])
    assert sorted(rows[:, 0].tolist()) == [0.0] * 6 + [1.0] * 6
    assert {*rows[:, 1].tolist()} == {6.0}


def test_workers_with_gpus_of_several_kinds_are_refused():
    engine.refuse_several_kinds({"NVIDIA H100 80GB HBM3"})
    with pytest.raises(
        FedsimError, match=r"different kinds \(NVIDIA A100, NVIDIA H100\).*one kind"
    ):
        engine.refuse_several_kinds({"NVIDIA H100", "NVIDIA A100"})

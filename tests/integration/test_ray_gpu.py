"""Ray workers that share a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn

import fedsim
from fedsim import RunConfig
from fedsim.clients import AdadpLR
from fedsim.engines import LocalGrid, array_record
from fedsim.federation.arrays import tensors
from fedsim.federation.engines.ray import RayGrid
from fedsim.federation.exchange import Instructions, Recipients
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.training import ClientData, Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def test_two_workers_on_half_a_gpu_each_train_as_one_process_does():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 1, 8, 8, generator=generator)
    y = torch.randint(3, (240,), generator=generator)
    data = ClientData(x, y, list(np.arange(240).reshape(24, 10)))
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    trainer = Trainer(
        model, AdadpLR(lr=0.1), data, batch_size=5, epochs=2, randomness=Randomness(0),
        device="cuda",
    )  # fmt: skip
    vector = trainer.initial().detach().cpu()
    ids = np.arange(24)
    asked = Instructions(
        message_type="train",
        round=1,
        arrays=array_record({"w": vector}),
        vector=vector,
        recipients=Recipients(ids, (ids + 2).astype(np.uint64)),
        config=ConfigRecord({"server-round": 1}),
        layout=Layout.of({"w": vector}),
    )
    here = by_client(LocalGrid(trainer), asked)
    with RayGrid(trainer, workers=2, cpus_per_worker=0.1, gpus_per_worker=0.5) as grid:
        there = by_client(grid, asked)
    assert sorted(there) == sorted(here) == ids.tolist()
    for client, row in here.items():
        torch.testing.assert_close(there[client], row, rtol=0, atol=1e-5)


def test_a_private_run_with_two_ray_workers_releases_the_bytes_of_one_process():
    config = RunConfig.parse(
        {
            "seed": 1,
            "rounds": 2,
            "data": {"name": "digits"},
            "partition": {"name": "iid", "clients": 40},
            "model": {"name": "softmax"},
            "client": {"name": "sgd", "lr": 0.5},
            "cohort": {"name": "poisson", "rate": 0.5},
            "mechanism": {"name": "normalization", "clip-norm": 1.0},
            "noise": {"multiplier": 0.5},
            "evaluate": {"every": 1},
            "engine": {"device": "cuda"},
        }
    )
    shared = {"engine.name": "ray", "engine.workers": 2, "engine.gpus-per-worker": 0.5}
    one, two = (tensors(fedsim.run(each).arrays) for each in (config, config.replace(**shared)))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def by_client(grid, asked):
    return {
        client: row.cpu()
        for block in grid.send_and_receive(asked).blocks()
        for client, row in zip(block.client_ids.tolist(), block.rows, strict=True)
    }

"""What runs on a GPU, on tensors that only say that they are there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from clients_helpers import make_cnn, make_data, make_mlp
from cuda_helpers import (
    ALGORITHMS,
    MODELS,
    NoReadingBack,
    Tape,
    as_if_on_a_gpu,
    images,
    make_trainer,
    pretend,
    rounds,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedsim.randomness import Randomness
from fedsim.training import ClientData
from fedsim.training.batches import plan_batches
from fedsim.training.graphs import StepGraphs
from fedsim.training.local_step import exact
from fedsim.training.paths.choice import choose
from fedsim.training.steps import Steps

SIZES = [9, 5, 7, 1, 14, 0, 12]


@pytest.mark.parametrize("path", ["stacked", "func"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_for_a_gpu_are_those_of_the_plain_path_and_read_nothing_back(monkeypatch, path, name):
    plain = make_trainer(MODELS[path](), ALGORITHMS[name], images(SIZES), "plain")
    expected = rounds(plain, plain.initial(), [range(7)] * 2)
    trainer = make_trainer(MODELS[path](), ALGORITHMS[name], images(SIZES), path)
    vector = pretend(trainer.initial())
    trainer = as_if_on_a_gpu(monkeypatch, trainer)
    launched = trainer.bench.step

    def watched(*step):
        with NoReadingBack():
            return launched(*step)

    trainer.bench.step = watched
    for got, wanted in zip(rounds(trainer, vector, [range(7)] * 2), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_step_mixes_the_gpu_with_the_host(monkeypatch, name):
    """On tensors without data, which know their device and refuse to be read."""
    monkeypatch.setattr("fedsim.training.graphs.CudaRecorder", lambda device: None)
    algorithm, own = ALGORITHMS[name], images(SIZES).indices
    with FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
            clients = ClientData(
                torch.empty(64, 6, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64), own,
                torch.zeros(6), torch.ones(6),
            )  # fmt: skip
        monkeypatch.setattr(model, "to", lambda device: model)
        trainer = make_trainer(model, algorithm, clients, "auto", device="cuda")
        assert trainer.path.name == "stacked"
        trainer.bench.step = trainer.bench.step.launched
        start = trainer.packing.pack(trainer.initial().unsqueeze(0))
        sources = [Randomness(0)] * len(own)
        work = trainer.workload.work
        for t in (1, 2):
            for batches in plan_batches(work, own, np.arange(len(own)), sources, t):
                n = len(batches.members)
                ended = Steps(trainer.bench, batches, t).run(
                    start.expand(n, -1).clone(),
                    {k: start.new_full((n,), v) for k, v in algorithm.numbers().items()},
                    {}, torch.ones(n, dtype=torch.bool, device="cuda"),
                )  # fmt: skip
                assert {found.device.type for found in (ended.theta, *ended.reports.values())} == {
                    "cuda"
                }


class Branches(nn.Linear):
    """Looks at a value to know what to do."""

    def forward(self, x):
        return super().forward(x.flatten(1)) * (1 if x.sum() > 0 else 2)


@pytest.mark.parametrize(
    ("model", "path"), [(make_cnn(), "func"), (nn.Sequential(Branches(36, 3)), "plain")]
)
def test_a_model_that_vmap_cannot_take_trains_plainly_on_a_gpu(model, path):
    clients = make_data([3, 3], features=36, shape=(1, 6, 6))
    trainer = make_trainer(model, ALGORITHMS["sgd"], clients, "plain")
    chosen = choose(
        "auto", model, trainer.packing, trainer.loss, device=torch.device("cuda"), data=clients
    )
    assert chosen.name == path


def test_the_host_asks_a_gpu_as_often_for_many_steps_as_for_few(monkeypatch):
    asked = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: asked.append(1) or real(t))
    counts = set()
    for epochs in (1, 20):
        trainer = make_trainer(make_mlp(), ALGORITHMS["adadp"], make_data([9, 9, 9]), "auto")
        trainer.workload.work = dataclasses.replace(trainer.workload.work, epochs=epochs)
        trainer = as_if_on_a_gpu(monkeypatch, trainer)
        trainer.bench.step = StepGraphs(trainer.bench.step, Tape())
        asked.clear()
        next(trainer.train(pretend(trainer.initial()), np.arange(3), 1))
        counts.add(len(asked))
    assert len(counts) == 1


def test_an_evaluation_asks_a_gpu_by_the_call_and_not_by_the_client(monkeypatch):
    trainer = make_trainer(make_mlp(), ALGORITHMS["sgd"], make_data([70] * 100), "auto")
    asked = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: asked.append(1) or real(t))
    next(trainer.evaluate(trainer.initial(), np.arange(100), 1))
    # 300 chunks of 100 clients in a first call of one and five of up to 64: outputs and targets.
    assert len(asked) == 2 * 6


def test_a_gpu_computes_exactly_and_the_same_every_time_while_clients_train():
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, products.allow_tf32)
    with exact(torch.device("cuda")):
        assert (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark) == (False, True, False)
        assert not products.allow_tf32
    after = (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, products.allow_tf32)
    assert after == before

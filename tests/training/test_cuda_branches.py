"""What runs on a GPU, on tensors that only say that they are there."""

from __future__ import annotations

import dataclasses
import gc
import os
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from clients_helpers import make_cnn, make_data, make_mlp
from cuda_helpers import (
    ALGORITHMS,
    DEVICES,
    MODELS,
    NoReadingBack,
    Tape,
    as_if_on_a_gpu,
    images,
    make_trainer,
    needs_a_fake_gpu,
    pretend,
    rounds,
)
from slow_cases import slow_but
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedsim.clients import SGD
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.tasks import CrossEntropy
from fedsim.training import ClientData, ExamplePrivacy, trainer_checks
from fedsim.training.client_state import CarriedState
from fedsim.training.frozen_stem import split_frozen_stem
from fedsim.training.graphs import CudaRecorder, StepGraphs
from fedsim.training.paths.path_choice import choose
from fedsim.training.side_effects import reproducible_arithmetic
from fedsim.training.steps import StepLoop

SIZES = [9, 5, 7, 1, 14, 0, 12]


@pytest.mark.spanning
@pytest.mark.parametrize("path", ["layered", "func"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_for_a_gpu_are_those_of_the_plain_path_and_read_nothing_back(monkeypatch, path, name):
    plain = make_trainer(MODELS[path](), ALGORITHMS[name], images(SIZES), "plain")
    expected = rounds(plain, plain.initial(), [range(7)] * 2)
    trainer = make_trainer(MODELS[path](), ALGORITHMS[name], images(SIZES), path)
    vector = pretend(trainer.initial())
    trainer = as_if_on_a_gpu(monkeypatch, trainer)
    eager = trainer.stepper.step_eagerly

    def watched(*step):
        with NoReadingBack():
            return eager(*step)

    trainer.stepper.step_eagerly = watched
    for got, wanted in zip(rounds(trainer, vector, [range(7)] * 2), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@needs_a_fake_gpu
@pytest.mark.parametrize("name", slow_but(4, ALGORITHMS))
def test_no_step_mixes_the_gpu_with_the_host(monkeypatch, name):
    """On tensors without data, which know their device and refuse to be read."""
    monkeypatch.setattr("fedsim.training.graphs.CudaRecorder", lambda device: None)
    algorithm, own = ALGORITHMS[name], images(SIZES).indices
    with FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
            clients = ClientData(
                torch.empty(64, 6, dtype=torch.uint8),
                torch.zeros(64, dtype=torch.int64),
                own,
                torch.zeros(6),
                torch.ones(6),
            )
        monkeypatch.setattr(model, "to", lambda device: model)
        trainer = make_trainer(model, algorithm, clients, "auto", device="cuda")
        assert trainer.path.name == "layered"
        trainer.stepper.captured_step = None
        start = trainer.packing.pack(trainer.initial().unsqueeze(0))
        sources = [Randomness(0)] * len(own)
        for t in (1, 2):
            for _, block in trainer.rounds.blocks(np.arange(len(own)), t, sources, len(own)):
                if (batches := block.batches) is None:
                    continue
                n = len(block)
                # A trainer adds what the server sends beside the model.
                vectors = {k: torch.zeros_like(start).expand(n, -1) for k in algorithm.receives}
                ended = StepLoop(trainer.stepper, batches, t).run(
                    start.expand(n, -1).clone(),
                    {k: start.new_full((n,), v) for k, v in algorithm.numbers().items()} | vectors,
                    CarriedState(np.ones(n, dtype=np.bool_), {}),
                )
                assert {found.device.type for found in (ended.theta, *ended.reports.values())} == {
                    "cuda"
                }


def test_a_loss_with_weights_is_where_its_outputs_are(monkeypatch):
    loss = nn.CrossEntropyLoss(torch.ones(3), reduction="none")
    elsewhere = trainer_checks.loss_on(loss, torch.device("meta"))
    assert (elsewhere.weight.is_meta, loss.weight.is_meta) == (True, False)
    assert trainer_checks.loss_on(loss, torch.device("cpu")) is loss
    assert trainer_checks.loss_on(torch.add, torch.device("meta")) is torch.add
    # It trains on the trainer's device and evaluates on the host, where metrics are.
    trained, evaluated = nn.CrossEntropyLoss(reduction="none"), CrossEntropy()
    moved = {(loss, "cpu"): trained, (trained, "cpu"): evaluated}
    monkeypatch.setattr(trainer_checks, "loss_on", lambda loss, device: moved[loss, device.type])
    trainer = make_trainer(make_mlp(), SGD(), make_data([3]), "plain", loss=loss)
    assert (trainer.loss, trainer.trained.loss) == (loss, trained)
    assert trainer.evaluation._metrics["loss"].function is evaluated


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
    chosen = choose("auto", trainer.trained, torch.device("cuda"))
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
        trainer.stepper.captured_step = StepGraphs(trainer.stepper, Tape(), 4)
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
    with reproducible_arithmetic(torch.device("cuda")):
        assert (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark) == (False, True, False)
        assert not products.allow_tf32
    with reproducible_arithmetic(torch.device("cuda"), tf32=True):
        assert (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark) == (True, True, False)
        assert products.allow_tf32
    after = (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, products.allow_tf32)
    assert after == before


def flags():
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


def set_flags(allowed):
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = allowed


class Notes(SGD):
    """Notes how products are computed where it steps."""

    noted: ClassVar[set[tuple[bool, bool]]] = set()

    def phase(self, at):
        return None  # a graph would be replayed without it

    def step(self, state, gradient, at):
        self.noted.add(flags())
        super().step(state, gradient, at)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("matmul", ["float32", "tf32"])
def test_local_steps_round_factors_as_declared_and_restore_what_was_set(
    monkeypatch, request, matmul, private, device
):
    if device == "cpu":
        monkeypatch.setattr(
            "fedsim.training.steps.reproducible_arithmetic",
            lambda _, tf32: reproducible_arithmetic(torch.device("cuda"), tf32=tf32),
        )
    own = {"privacy": ExamplePrivacy(Clipping(1.0), 1.0)} if private else {}
    trainer = make_trainer(
        make_mlp(), Notes(), make_data([5, 5]), "func", device=device, matmul=matmul, **own
    )
    request.addfinalizer(partial(set_flags, flags()))
    for before in ((False, False), (True, True)):
        set_flags(before)
        Notes.noted.clear()
        next(trainer.train(trainer.initial(), np.arange(2), 1))
        assert {(matmul == "tf32",) * 2} == Notes.noted
        assert flags() == before


@pytest.mark.parametrize("matmul", ["float32", "tf32"])
def test_only_local_steps_multiply_as_declared_and_copies_do_too(monkeypatch, matmul):
    declared = []
    monkeypatch.setattr(
        "fedsim.training.steps.reproducible_arithmetic",
        lambda device, tf32: declared.append(tf32) or reproducible_arithmetic(device, tf32=tf32),
    )
    trainer = make_trainer(make_mlp(), SGD(), make_data([5, 5]), "layered", matmul=matmul)
    for each in (trainer, trainer.copy_for("cpu")):
        next(each.train(trainer.initial(), np.arange(2), 1))
        next(each.evaluate(trainer.initial(), np.arange(2), 1))
    assert declared == [matmul == "tf32"] * 2


def test_a_frozen_stem_is_gone_through_as_exactly_as_the_rest(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "fedsim.training.frozen_stem.reproducible_arithmetic",
        lambda device: asked.append(device) or reproducible_arithmetic(torch.device("cuda")),
    )
    stem = nn.Conv2d(1, 2, 3).requires_grad_(False)
    stem.register_forward_hook(lambda *_: asked.append(torch.backends.cudnn.allow_tf32))
    data = make_data([3, 3], features=36, shape=(1, 6, 6))
    rest, _ = split_frozen_stem(nn.Sequential(stem, nn.Flatten(), nn.Linear(32, 3)), data)
    assert len(rest) == 1
    assert asked == [data.x.device] + [False] * (1 + 6)  # once for the size of an output


def test_workspaces_of_a_gpus_products_are_fixed_before_any_product_unless_the_user_chose(
    monkeypatch,
):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with reproducible_arithmetic(torch.device("cpu")):
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with reproducible_arithmetic(torch.device("cuda")):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with reproducible_arithmetic(torch.device("cuda")):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


class FakeCuda:
    """What a recorder calls of `torch.cuda`: two streams, and who has waited for whom."""

    def __init__(self, monkeypatch):
        self.main, self.side = FakeStream(self, "main"), FakeStream(self, "side")
        self.current, self.debug, self.events = self.main, "default", []
        for name, value in {
            "Stream": lambda device: self.side,
            "current_stream": lambda device: self.current,
            "stream": self.stream,
            "graph": self.graph,
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "get_sync_debug_mode": lambda: self.debug,
            "set_sync_debug_mode": lambda mode: setattr(self, "debug", mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        # Else a thread that allocates spoils a capture, and the collector, by freeing a graph.
        assert capture_error_mode == "thread_local"
        assert not gc.isenabled()
        self.current = stream
        yield  # as releases of torch that leave it so after a capture that failed
        self.current = self.main


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.events.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", range(1, 6))
def test_a_recording_that_fails_anywhere_leaves_its_stream_joined_and_the_callers_current(
    monkeypatch, fails
):
    cuda = FakeCuda(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda"))
    runs = []

    def work():
        assert cuda.current is cuda.side
        cuda.events.append("launched")
        runs.append(cuda.debug)
        if len(runs) == fails:
            raise RuntimeError("out of memory")
        return {}, torch.zeros(1)

    with pytest.raises(RuntimeError, match="out of memory") if fails < 5 else nullcontext():
        recorder.record(work)
    assert (cuda.current, cuda.debug) == (cuda.main, "default")
    assert gc.isenabled()
    assert runs == ["default", "default", "error", "default"][:fails]
    joined = ["side waits for main", *["launched"] * min(fails, 3), "main waits for side"]
    assert cuda.events == joined + ["launched"] * (fails > 3)

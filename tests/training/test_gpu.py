"""A GPU against the CPU, and captured steps against eager ones, on a real device."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from clients_helpers import make_cnn, make_data, make_mlp
from cuda_helpers import ALGORITHMS, Reads, make_trainer, rounds
from release_helpers import plan_of

from fedsim import models
from fedsim.clients import SGD, AdadpLR
from fedsim.kernels import device_normals
from fedsim.mechanisms import AdaClip, Clipping, NoiseSource, NoPrivacy, Releaser
from fedsim.privacy import Independent
from fedsim.randomness import Randomness
from fedsim.rows import DenseRows, Layout
from fedsim.training import ClientData, ExamplePrivacy, Trainer
from fedsim.training.graphs import StepGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def _rounds_factors() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


SIZES = [9, 5, 7, 1, 14, 0, 12]
COHORTS = [range(7), [0, 2, 4], range(7)]


def make(kind, algorithm, path, device, dtype=torch.float64, sizes=SIZES, **settings):
    model = {"mlp": lambda: make_mlp(36, 5, 3, dtype=dtype), "cnn": lambda: make_cnn(dtype=dtype)}
    data = make_data(sizes, dtype=dtype, features=36, shape=(1, 6, 6))
    return make_trainer(model[kind](), algorithm, data, path, device=device, **settings)


def eager(trainer):
    """The trainer, whose steps are made for the same rows without a graph."""
    trainer.stepper.captured_step.can_capture = False
    return trainer


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("kind", "path"),
    [("mlp", "layered"), ("mlp", "func"), ("mlp", "plain"), ("cnn", "func"), ("cnn", "plain")],
)
def test_every_path_and_algorithm_agrees_with_the_cpu(kind, path, name):
    cpu = make(kind, ALGORITHMS[name], "plain", "cpu")
    gpu = make(kind, ALGORITHMS[name], path, "cuda")
    expected, got = (rounds(t, t.initial(), COHORTS) for t in (cpu, gpu))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    if path != "plain":
        assert gpu.stepper.captured_step.can_capture
        assert gpu.stepper.captured_step.graphs


@pytest.mark.parametrize("name", ["momentum", "adam", "adadp"])
@pytest.mark.parametrize(("kind", "path"), [("mlp", "layered"), ("cnn", "func")])
def test_a_float32_step_agrees_with_the_cpu_to_1e_5(kind, path, name):
    found = []
    for way, device in (("plain", "cpu"), (path, "cuda")):
        trainer = make(kind, ALGORITHMS[name], way, device, torch.float32, [4] * 5)
        trainer.workload.work = type(trainer.workload.work)(4, None, 2 if name == "adadp" else 1)
        found += rounds(trainer, trainer.initial(), [range(5)])
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("kind", "path"), [("mlp", "layered"), ("cnn", "func")])
def test_captured_steps_are_the_eager_ones_to_the_byte(kind, path, name, dtype):
    # At most seven clients: their number is not rounded up.
    captured = make(kind, ALGORITHMS[name], path, "cuda", dtype)
    plainly = eager(make(kind, ALGORITHMS[name], path, "cuda", dtype))
    expected, got = (rounds(t, t.initial(), COHORTS) for t in (plainly, captured))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert captured.stepper.captured_step.can_capture
    assert captured.stepper.captured_step.graphs


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", ["sgd", "adam", "adadp"])
@pytest.mark.parametrize(
    ("kind", "path"), [("mlp", "layered"), ("mlp", "func"), ("cnn", "func"), ("cnn", "plain")]
)
def test_a_client_has_the_same_bytes_whoever_shares_its_block(kind, path, name, captured):
    trainer = make(kind, ALGORITHMS[name], path, "cuda", torch.float32)
    if path != "plain" and not captured:
        eager(trainer)
    vector = trainer.initial()
    together = rounds(trainer, vector, [range(7)])[0]
    for others in ([0], [3], [2, 4], [6, 0], [1, 4, 2], [5, 6, 3, 0, 1]):
        rows = rounds(trainer, vector, [others])[0]
        assert torch.equal(rows, together[others])


def test_a_graph_that_the_collector_frees_spoils_no_other_trainers_capture():
    captured, sgd = [], ALGORITHMS["sgd"]
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(1)  # wherever an object is made
        for _ in range(4):
            trainer = make("mlp", sgd, "func", "cuda")
            trainer.itself = trainer  # a cycle: it goes when the collector runs
            rounds(trainer, trainer.initial(), COHORTS[:1])
            captured.append(
                trainer.stepper.captured_step.can_capture
                and bool(trainer.stepper.captured_step.graphs)
            )
            del trainer
    finally:
        gc.set_threshold(*threshold)
    assert all(captured)


def cifar_trainer(device, path="auto"):
    """ADADP's network on five clients."""
    model = models.build("adadp-cifar", (3, 32, 32), 10)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    x = torch.randint(256, (250, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (250,), generator=generator)
    data = ClientData(x, y, list(np.arange(250).reshape(5, 50)))
    return Trainer(
        model, AdadpLR(lr=0.01), data, batch_size=10, path=path, device=device,
        randomness=Randomness(1),
    )  # fmt: skip


def test_adadps_network_is_captured_and_a_run_repeats_to_the_byte():
    found = []
    for _ in range(2):
        trainer = cifar_trainer("cuda")
        assert trainer.path.name == "func"
        found += rounds(trainer, trainer.initial(), [range(5)])
        assert trainer.stepper.captured_step.can_capture
        assert trainer.stepper.captured_step.graphs
    assert torch.equal(*found)
    plain = cifar_trainer("cpu", "plain")
    expected = rounds(plain, plain.initial(), [range(5)])[0]
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-3)


def test_a_loss_of_the_users_own_is_captured_too():
    def squared(outputs, targets):
        return (outputs - torch.nn.functional.one_hot(targets, 3)).square().sum(1)

    gpu = make("mlp", SGD(lr=0.005), "layered", "cuda", loss=squared)
    cpu = make("mlp", SGD(lr=0.005), "plain", "cpu", loss=squared)
    got, expected = (rounds(t, t.initial(), COHORTS) for t in (gpu, cpu))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert gpu.stepper.captured_step.can_capture


def test_a_step_that_reads_back_goes_on_without_a_graph_and_spoils_nothing():
    reads = make("mlp", Reads(lr=0.1), "layered", "cuda")
    plain = eager(make("mlp", SGD(lr=0.1), "layered", "cuda"))
    got, expected = (rounds(t, t.initial(), COHORTS) for t in (reads, plain))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert isinstance(reads.stepper.captured_step, StepGraphs)
    assert not reads.stepper.captured_step.can_capture
    # Others can still capture.
    later = make("mlp", SGD(lr=0.1), "layered", "cuda")
    rounds(later, later.initial(), COHORTS)
    assert later.stepper.captured_step.can_capture


def test_memory_does_not_grow_with_rounds():
    trainer = make("mlp", AdadpLR(lr=0.1), "layered", "cuda", torch.float32, [9] * 50)
    cohorts = [np.random.default_rng(t).permutation(50)[: 20 + t % 25] for t in range(60)]
    rounds(trainer, trainer.initial(), cohorts[:30])
    before = torch.cuda.memory_reserved()
    rounds(trainer, trainer.initial(), cohorts)
    assert torch.cuda.memory_reserved() <= before + 2**24


def test_evaluations_agree_with_the_cpu():
    values = []
    for device in ("cpu", "cuda"):
        trainer = make("cnn", SGD(lr=0.1), "auto", device)
        block = next(trainer.evaluate(trainer.initial(), np.arange(7), 1))
        values.append(block.metrics)
    for name in values[0]:
        np.testing.assert_allclose(values[0][name], values[1][name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mechanism", [Clipping(0.5), AdaClip(), NoPrivacy("uniform")])
def test_rows_of_a_gpu_are_bounded_and_summed_as_on_the_cpu(mechanism):
    layout = Layout.of({"w": torch.zeros(300)})
    rows = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    rows[3, 5] = float("nan")
    means = []
    for device in ("cpu", "cuda"):
        state = mechanism.init(layout)
        releaser = Releaser(plan_of(mechanism, Independent(0.0), 39.0), layout, device=device)
        total = releaser.start(state)
        total.add(DenseRows(rows.to(device)))
        assert (total.count, total.rejected) == (39, 1)
        release = releaser.release(total, NoiseSource(np.random.default_rng(0)))
        means.append(release.mean.cpu())
    torch.testing.assert_close(*means, rtol=0, atol=1e-7)


@pytest.mark.parametrize("hardened", [False, True])
def test_noise_on_a_gpu_is_fused_and_the_bytes_of_a_cpu(hardened):
    generator = torch.Generator().manual_seed(0)
    key, counter = (torch.randint(-(2**62), 2**62, (5, k), generator=generator) for k in (2, 3))
    on_cpu = device_normals.normals_at(key, counter, 10_000, hardened=hardened)
    on_gpu = device_normals.normals_at(key.cuda(), counter.cuda(), 10_000, hardened=hardened)
    assert torch.equal(on_gpu.cpu(), on_cpu)
    assert device_normals._fused(4 if hardened else 1) is not None


@pytest.mark.skipif(not _rounds_factors(), reason="this GPU has no TF32")
@pytest.mark.parametrize("path", ["layered", "func", "plain"])
def test_tf32_moves_a_step_as_far_as_its_rounding_and_float32_does_not(path):
    cpu = wide("cpu", "plain", "float32")
    (expected,) = rounds(cpu, cpu.initial(), [range(2)])
    errors = {}
    for matmul in ("float32", "tf32"):
        gpu = wide("cuda", path, matmul)
        (found,) = rounds(gpu, gpu.initial(), [range(2)])
        errors[matmul] = float((found - expected).norm() / expected.norm())
    assert errors["float32"] < 1e-5
    # Ten bits of a factor instead of 23.
    assert 3e-5 < errors["tf32"] < 1e-2


def wide(device, path, matmul):
    """A trainer of a model with wide products, in single precision."""
    data = make_data([32, 32], dtype=torch.float32, features=512)
    return Trainer(
        make_mlp(512, 256, 3), SGD(lr=0.1), data, batch_size=32, path=path, device=device,
        matmul=matmul, randomness=Randomness(0),
    )  # fmt: skip


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("mechanism", [Clipping(0.5), AdaClip(clip_norm=0.5)])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_private_steps_are_captured_to_the_byte_and_agree_with_the_cpu(
    monkeypatch, kind, mechanism, in_step
):
    # The same draws on both: those of a GPU have the same bytes on a CPU.
    for module in ("local_rounds", "trainer"):
        monkeypatch.setattr(f"fedsim.training.{module}.draws_on_device", lambda *_: in_step)
    privacy = ExamplePrivacy(mechanism, 0.7, chunk=4)

    def private(device):
        return make(kind, AdadpLR(lr=0.1, discard=False), "auto", device, privacy=privacy)

    cpu, captured, plainly = private("cpu"), private("cuda"), eager(private("cuda"))
    expected, found, again = (rounds(t, t.initial(), COHORTS) for t in (cpu, captured, plainly))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert captured.stepper.captured_step.can_capture
    assert captured.stepper.captured_step.graphs

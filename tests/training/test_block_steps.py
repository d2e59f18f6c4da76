"""Clients with small dense models take their steps together: compiled, to torch's bytes."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp, reading_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_bytes import same_bytes
from torch import nn

from fedsim.clients import SGD, AdadpLR, Adam, LocalAlgorithm
from fedsim.clients.proximal import Proximal
from fedsim.clients.schedules import Schedule
from fedsim.errors import FedsimError
from fedsim.federation.engines.blocks import guarded_blocks
from fedsim.kernels import dense
from fedsim.kernels.classes import ClassBatches
from fedsim.kernels.dense_calls import DenseBatch
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import CrossEntropy
from fedsim.training import Trainer
from fedsim.training.paths import stacked
from fedsim.training.paths.stacked import CompiledBlock, EagerBlock, stack
from fedsim.training.plain_steps import BlockSteps

compiled = pytest.mark.skipif(not dense._compiled(), reason="there is no C compiler")

SIZES = [9, 0, 14, 1, 12, 7, 4, 12, 30]
IDS = np.arange(len(SIZES))
ALGORITHMS = [
    SGD(lr=0.3),
    SGD(lr=0.3, schedule=Schedule("inverse", decay=0.1, over="step")),
    SGD(lr=0.3, momentum=0.9, weight_decay=0.01),
    Adam(lr=0.01),
    AdadpLR(lr=0.2, tol=0.5),
    Proximal(SGD(lr=0.2), mu=0.5),
]


def trained(algorithm: LocalAlgorithm, features: int = 20, rounds: int = 2, **changes: object):
    """Rows and losses of the last of some rounds, and where they lead."""
    dtype = changes.pop("dtype", torch.float32)
    settings = {
        "model": make_mlp(features, 17, 3, dtype=dtype),
        "data": make_data(SIZES, features=features, dtype=dtype),
        "batch_size": 5,
        "epochs": 2,
        "path": "stacked",
        "randomness": Randomness(3),
    } | changes
    trainer = Trainer(algorithm=algorithm, **settings)
    vector = trainer.initial()
    for t in range(1, rounds + 1):
        found = list(trainer.train(vector, IDS, t))
        rows = torch.cat([block.rows for block in found])
        vector = vector + rows.mean(0)
    return rows, np.concatenate([block.metrics["loss"] for block in found]), vector


def launch_by_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled."""
    monkeypatch.setattr(stacked, "blocks_of", lambda *_: iter(()))
    by_arrays = ClassBatches._by_arrays
    monkeypatch.setattr(
        ClassBatches,
        "gradients",
        lambda self, outputs, first: by_arrays(self, outputs, first),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_clients_of_a_block_agree_with_the_plain_path(algorithm: LocalAlgorithm) -> None:
    mine = trained(algorithm, rounds=5, dtype=torch.float64)
    plain = trained(algorithm, rounds=5, dtype=torch.float64, path="plain")
    for ours, theirs in zip(mine, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
@pytest.mark.parametrize("batch_size", [3, 5, 12, 0])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_they_have_the_same_bytes_in_any_block_with_and_without_a_compiler(
    algorithm: LocalAlgorithm, batch_size: int, max_grad_norm: float, monkeypatch
) -> None:
    changes = {"batch_size": batch_size, "max_grad_norm": max_grad_norm}
    found = [trained(algorithm, block_size=size, **changes) for size in (9, 1, 4)]
    launch_by_launch(monkeypatch)
    found += [trained(algorithm, block_size=size, **changes) for size in (9, 1)]
    first, *others = ([np.asarray(values).tobytes() for values in ended] for ended in found)
    assert others == [first] * len(others)


@pytest.mark.parametrize("target", [3, 10**6, -1])
@pytest.mark.parametrize("alone_bytes", [0, 2**40])
def test_a_target_that_is_no_class_fails_its_client_alone(target, alone_bytes, monkeypatch) -> None:
    monkeypatch.setattr(stacked, "SEQUENTIAL_BYTES", alone_bytes)
    data = make_data(SIZES, features=20)
    found = []
    for wrong in (False, True):
        y = data.y.clone()
        if wrong:
            y[data.indices[4][0]] = target
        clients = type(data)(data.x, y, data.indices)
        model = make_mlp(20, 17, 3)
        trainer = Trainer(
            model, SGD(lr=0.1), clients, batch_size=5, path="stacked", randomness=Randomness(3)
        )
        found.append(list(guarded_blocks(trainer, "train", trainer.initial(), IDS, 1)))
    rows = [
        {
            client: row
            for block in blocks_found
            if block.rows is not None
            for client, row in zip(block.client_ids.tolist(), block.rows, strict=True)
        }
        for blocks_found in found
    ]
    assert set(rows[0]) - set(rows[1]) == {4}
    assert all(torch.equal(rows[0][client], row) for client, row in rows[1].items())


@pytest.mark.parametrize("alone_bytes", [0, 2**40])
def test_targets_that_are_numbers_are_refused_for_classes(alone_bytes, monkeypatch) -> None:
    monkeypatch.setattr(stacked, "SEQUENTIAL_BYTES", alone_bytes)
    data = make_data(SIZES, features=20)
    with pytest.raises(FedsimError, match="logits"):
        trained(SGD(lr=0.1), data=type(data)(data.x, data.y.float(), data.indices), metrics={})


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - nn.functional.one_hot(targets, outputs.shape[1])).square().sum(1)


def test_another_loss_has_the_same_bytes_in_any_block(monkeypatch) -> None:
    found = [trained(SGD(lr=0.1), block_size=size, loss=squares) for size in (9, 1, 4)]
    launch_by_launch(monkeypatch)
    first, *others = [*found, trained(SGD(lr=0.1), loss=squares)]
    assert all(torch.equal(first[0], other[0]) for other in others)


@st.composite
def networks(draw):
    """Widths, a batch, whether there are biases and activations, and a dtype."""
    depth = draw(st.integers(1, 3))
    widths = [draw(st.sampled_from([16, 20, 33, 64, 130])) for _ in range(depth)]
    widths.append(draw(st.integers(1, 40)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64]))
    return widths, draw(st.integers(2, 40)), draw(st.booleans()), draw(st.booleans()), dtype


def path_of(widths, biased, relu, dtype):
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        modules += [nn.Linear(inputs, outputs, bias=biased, dtype=dtype)]
        modules += [nn.ReLU()] if relu else []
    model = nn.Sequential(*modules)
    packing = Packing(Layout.of(dict(model.named_parameters())))
    path = stack(reading_of(model, widths[:1]).structure, packing, CrossEntropy(), 1)
    assert path is not None
    return path


@compiled
@settings(max_examples=80, deadline=None)
@given(networks(), st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_a_compiled_pass_has_the_bytes_of_an_eager_one(network, seed, n) -> None:
    widths, batch, biased, relu, dtype = network
    path = path_of(widths, biased, relu, dtype)
    generator = torch.Generator().manual_seed(seed)
    theta, other = (
        torch.randn(n, path.packing.width, generator=generator, dtype=dtype) for _ in range(2)
    )
    x = stacked.aligned_empty(theta, n, batch, widths[0]).normal_(generator=generator)
    delta = torch.randn(n, batch, widths[-1], generator=generator, dtype=dtype)
    rates = torch.rand(n, generator=generator, dtype=dtype)
    # Zeros have signs, which sums of zeros keep or lose.
    theta[:, ::7], x[..., ::3], delta[:, :, ::4] = -0.0, 0.0, -0.0
    found = []
    for way in (path.dense.forward(theta, x), path.dense.eager(theta, x)):
        gradient = way.backward(delta)
        inside, into = theta.clone(), other.clone()
        gradient.subtract_from(inside, rates)
        gradient.subtract_from(theta, rates, into)
        factors = [part for factor in gradient.factors for part in (factor.x, factor.delta)]
        found.append([way.outputs, inside, into, *factors, gradient.dense()])
    assert all(map(same_bytes, *found))


@compiled
def test_a_usual_model_is_gone_through_compiled() -> None:
    """Else the other tests would compare the eager pass with itself."""
    if not dense._compiled()[torch.float32].makes_few:
        pytest.skip("this processor has other products")
    for widths in ([784, 10], [784, 32, 10]):
        path = path_of(widths, True, True, torch.float32)
        for batch in (10, 20):
            theta, x = torch.randn(3, path.packing.width), torch.randn(3, batch, widths[0])
            assert isinstance(path.dense.forward(theta, x), CompiledBlock)
        assert isinstance(path.dense.forward(theta, torch.randn(3, 200, widths[0])), EagerBlock)


@compiled
@pytest.mark.parametrize("wrong", ["outputs", "in place", "other rows", "factors"])
def test_what_gives_other_bytes_than_torch_is_not_used(wrong: str, monkeypatch) -> None:
    """As a library would that adds up in another order."""
    real = stacked.CompiledBlock._subtract

    def subtract(self, theta, rate, out):
        done = real(self, theta, rate, out)
        if (out is theta) == (wrong == "in place"):
            out[-1, 0] += 1
        return done

    if wrong == "outputs":
        monkeypatch.setattr(stacked.CompiledBlock, "outputs", property(lambda self: self.x))
    elif wrong == "factors":
        forward = DenseBatch.backward_all
        monkeypatch.setattr(
            DenseBatch, "backward_all", lambda self, *a: forward(self, *a[:2], 2 * a[2])
        )
    else:
        monkeypatch.setattr(stacked.CompiledBlock, "_subtract", subtract)
    path = path_of([16, 16], True, False, torch.float32)
    theta, x = torch.randn(3, path.packing.width), torch.randn(3, 6, 16)
    assert isinstance(path.dense.forward(theta, x), EagerBlock)


def test_rows_with_gaps_and_one_rate_for_all_are_taken_as_they_are() -> None:
    path = path_of([16, 16], True, False, torch.float32)
    theta, x, delta = torch.randn(3, path.packing.width), *torch.randn(2, 3, 6, 16)
    gapped = torch.empty(3, 2 * path.packing.width)[:, ::2].copy_(theta)
    rates = torch.full((1,), 0.25).expand(3)
    ended = []
    for rows in (theta, gapped):
        gradient = path.dense.forward(rows, x).backward(delta)
        for old, out in ((rows, torch.zeros_like(theta)), (theta, torch.zeros_like(gapped))):
            gradient.subtract_from(old, rates, out)
            ended.append(path.packing.unpack(out))
    for other in ended[1:]:
        torch.testing.assert_close(other, ended[0])


def test_inputs_with_gaps_are_read_where_they_are() -> None:
    path = path_of([16, 16], True, False, torch.float32)
    theta, x = torch.randn(3, path.packing.width), torch.randn(3, 16, 6).transpose(1, 2)
    outputs = path.dense.forward(theta, x).outputs
    torch.testing.assert_close(outputs, path.dense.forward(theta, x.contiguous()).outputs)


def test_a_path_can_be_sent_after_it_was_used() -> None:
    path = path_of([16, 16], True, False, torch.float32)
    theta, x = torch.randn(3, path.packing.width), torch.randn(3, 6, 16)
    wanted = path.dense.forward(theta, x).outputs
    sent = pickle.loads(pickle.dumps(path))
    assert torch.equal(sent.dense.forward(theta, x).outputs, wanted)


def test_the_rule_takes_these_steps_for_small_dense_models_on_a_cpu(monkeypatch) -> None:
    made = []
    init = BlockSteps.__init__
    monkeypatch.setattr(
        BlockSteps, "__init__", lambda self, *args: made.append(1) or init(self, *args)
    )
    trained(SGD(lr=0.1), rounds=1)
    assert made

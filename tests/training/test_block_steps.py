"""Clients with small dense models take their steps together, with either kernel."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_data, make_mlp, reading_of
from torch import nn
from toy_clients import training

from fedsim.clients import SGD, AdadpLR, Adam, LocalAlgorithm
from fedsim.clients.proximal import Proximal
from fedsim.clients.schedules import Schedule
from fedsim.errors import FedsimError
from fedsim.federation.engines.workers import guarded_blocks
from fedsim.kernels.dense import is_compiled
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.packing import Packing
from fedsim.training import Trainer
from fedsim.training.paths import program
from fedsim.training.paths.program import lowered
from fedsim.training.plain_steps import ProgramLoop

compiled = pytest.mark.skipif(not is_compiled(torch.float32), reason="there is no C compiler")

SIZES = [9, 0, 14, 1, 12, 7, 4, 12, 30]
IDS = np.arange(len(SIZES))
ALGORITHMS = [
    SGD(lr=0.3),
    SGD(lr=0.3, schedule=Schedule("inverse", decay=0.1, over="step")),
    SGD(lr=0.3, momentum=0.9, weight_decay=0.01),
    Adam(lr=0.01),
    AdadpLR(lr=0.2, tol=0.5),
    AdadpLR(lr=0.2, tol=0.5, keep="half"),
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
        "path": "layered",
        "randomness": Randomness(3),
    } | changes
    trainer = Trainer(algorithm=algorithm, **settings)
    vector = trainer.initial()
    for t in range(1, rounds + 1):
        rows, metrics = joined(trainer.train(vector, IDS, t))
        vector = vector + rows.mean(0)
    return rows, metrics["loss"], vector


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_clients_of_a_block_agree_with_the_plain_path(algorithm: LocalAlgorithm) -> None:
    mine = trained(algorithm, rounds=5, dtype=torch.float64)
    plain = trained(algorithm, rounds=5, dtype=torch.float64, path="plain")
    for ours, theirs in zip(mine, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.spanning
@pytest.mark.parametrize("kernel", ["auto", "eager"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
@pytest.mark.parametrize("batch_size", [3, 5, 12, 0])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_they_have_the_same_bytes_in_any_block(
    algorithm: LocalAlgorithm, batch_size: int, max_grad_norm: float, kernel: str
) -> None:
    changes = {"batch_size": batch_size, "max_grad_norm": max_grad_norm, "kernel": kernel}
    found = [trained(algorithm, block_size=size, **changes) for size in (9, 1, 4)]
    first, *others = ([np.asarray(values).tobytes() for values in ended] for ended in found)
    assert others == [first] * len(others)


@compiled
def test_one_step_of_both_kernels_agrees_in_single_precision() -> None:
    changes = {"steps": 1, "epochs": None}
    rows = [trained(SGD(lr=0.3), kernel=kernel, **changes)[0] for kernel in ("compiled", "eager")]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("target", [3, 10**6, -1])
@pytest.mark.parametrize("alone_bytes", [0, 2**40])
def test_a_target_that_is_no_class_fails_its_client_alone(target, alone_bytes, monkeypatch) -> None:
    monkeypatch.setattr(program, "SEQUENTIAL_BYTES", alone_bytes)
    data = make_data(SIZES, features=20)
    found = []
    for wrong in (False, True):
        y = data.y.clone()
        if wrong:
            y[data.indices[4][0]] = target
        clients = type(data)(data.x, y, data.indices)
        model = make_mlp(20, 17, 3)
        trainer = Trainer(
            model, SGD(lr=0.1), clients, batch_size=5, path="layered", randomness=Randomness(3)
        )
        found.append(list(guarded_blocks(trainer, training(trainer.initial(), 1), IDS)))
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
    monkeypatch.setattr(program, "SEQUENTIAL_BYTES", alone_bytes)
    data = make_data(SIZES, features=20)
    with pytest.raises(FedsimError, match="logits"):
        trained(SGD(lr=0.1), data=type(data)(data.x, data.y.float(), data.indices), metrics={})


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - nn.functional.one_hot(targets, outputs.shape[1])).square().sum(1)


@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_another_loss_has_the_same_bytes_in_any_block(kernel: str) -> None:
    first, *others = (
        trained(SGD(lr=0.1), block_size=size, loss=squares, kernel=kernel) for size in (9, 1, 4)
    )
    assert all(torch.equal(first[0], other[0]) for other in others)


def path_of(widths, biased, relu, dtype):
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        modules += [nn.Linear(inputs, outputs, bias=biased, dtype=dtype)]
        modules += [nn.ReLU()] if relu else []
    model = nn.Sequential(*modules)
    packing = Packing(Layout.of(dict(model.named_parameters())))
    path = lowered(reading_of(model, widths[:1]), packing, "compiled")
    assert path is not None
    return path


def written(path, theta, x):
    """Gradients of the outputs' sum."""
    return path.dense.gradient(theta, x, torch.ones_like)[0].dense()


def test_inputs_with_gaps_are_read_where_they_are() -> None:
    path = path_of([16, 16], True, False, torch.float32)
    theta, x = torch.randn(3, path.packing.width), torch.randn(3, 16, 6).transpose(1, 2)
    assert torch.equal(written(path, theta, x), written(path, theta, x.contiguous()))


def test_a_path_can_be_sent_after_it_was_used() -> None:
    path = path_of([16, 16], True, False, torch.float32)
    theta, x = torch.randn(3, path.packing.width), torch.randn(3, 6, 16)
    wanted = written(path, theta, x)
    assert torch.equal(written(pickle.loads(pickle.dumps(path)), theta, x), wanted)


def test_the_rule_takes_these_steps_for_small_dense_models_on_a_cpu(monkeypatch) -> None:
    made = []
    init = ProgramLoop.__init__
    monkeypatch.setattr(
        ProgramLoop, "__init__", lambda self, *args: made.append(1) or init(self, *args)
    )
    trained(SGD(lr=0.1), rounds=1)
    assert made

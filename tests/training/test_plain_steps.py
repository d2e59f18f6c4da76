"""Clients with large rows take their steps one after another: to the plain path's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_data, make_mlp, reading_of
from torch import nn

from fedsim.clients import SGD, AdadpLR, Adam, LocalAlgorithm
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.packing import Packing
from fedsim.training import ClientData, Trainer
from fedsim.training.paths import program
from fedsim.training.paths.losses import prepare_losses
from fedsim.training.paths.program import lowered

SIZES = [9, 0, 4, 1, 12, 7, 4]
IDS = np.arange(len(SIZES))
ALGORITHMS = [
    SGD(lr=0.3),
    SGD(lr=0.3, momentum=0.9, weight_decay=0.01),
    Adam(lr=0.01),
    AdadpLR(lr=0.2, tol=0.5),
    AdadpLR(lr=0.2, tol=0.5, keep="half"),
]


@pytest.fixture(autouse=True)
def every_row_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SEQUENTIAL_BYTES", 0)


def trained(path: str, algorithm: LocalAlgorithm, rounds: int = 1, **changes: object) -> tuple:
    dtype = changes.pop("dtype", torch.float64)
    settings = {
        "model": make_mlp(dtype=dtype),
        "data": make_data(SIZES, dtype=dtype),
        "batch_size": 4,
        "epochs": 2,
        "randomness": Randomness(3),
    } | changes
    trainer = Trainer(algorithm=algorithm, path=path, **settings)
    vector = trainer.initial()
    for t in range(1, rounds + 1):
        rows, metrics = joined(trainer.train(vector, IDS, t))
        vector = vector + rows.mean(0)
    losses = metrics["loss"]
    return rows, losses, vector


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_clients_that_train_alone_agree_with_the_plain_path(algorithm: LocalAlgorithm) -> None:
    rows, losses, vector = trained("layered", algorithm, rounds=10)
    plain_rows, plain_losses, plain_vector = trained("plain", algorithm, rounds=10)
    torch.testing.assert_close(vector, plain_vector, rtol=0, atol=1e-10)
    torch.testing.assert_close(rows, plain_rows, rtol=0, atol=1e-10)
    np.testing.assert_allclose(losses, plain_losses, rtol=0, atol=1e-10)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_clients_that_train_alone_have_the_same_bytes_in_any_block(
    algorithm: LocalAlgorithm,
) -> None:
    first, *others = (
        trained("layered", algorithm, dtype=torch.float32, block_size=size) for size in (1, 3, 7)
    )
    for other in others:
        assert torch.equal(first[0], other[0])
        assert first[1].tobytes() == other[1].tobytes()


@pytest.mark.parametrize("kernel", ["auto", "eager"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_a_kernel_gives_the_same_bytes_in_any_block(
    algorithm: LocalAlgorithm, max_grad_norm: float, kernel: str
) -> None:
    changes = {"dtype": torch.float32, "max_grad_norm": max_grad_norm, "kernel": kernel}
    rows, _, vector = trained("layered", algorithm, rounds=2, **changes)
    others, _, other_vector = trained("layered", algorithm, rounds=2, block_size=2, **changes)
    assert torch.equal(rows, others)
    assert torch.equal(vector, other_vector)


def test_gradients_that_are_shortened_agree_with_the_plain_path() -> None:
    rows = [trained(path, SGD(lr=0.3), max_grad_norm=0.1)[0] for path in ("layered", "plain")]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-10)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - nn.functional.one_hot(targets, outputs.shape[1])).square().sum(1)


@pytest.mark.parametrize("alone", [0, 2**40])
@pytest.mark.parametrize("loss", ["cross-entropy", "own"])
def test_any_loss_and_targets_that_do_not_count_train_as_on_the_plain_path(
    loss: str, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "SEQUENTIAL_BYTES", alone)
    data, changes = make_data(SIZES, dtype=torch.float64), {}
    if loss == "own":
        changes["loss"] = squares
    else:
        mask = torch.arange(len(data.x)) % 3 > 0
        changes["data"] = ClientData(data.x, data.y, data.indices, mask=mask)
    for mine, plain in zip(
        trained("layered", SGD(lr=0.3), **changes),
        trained("plain", SGD(lr=0.3), **changes),
        strict=True,
    ):
        torch.testing.assert_close(
            torch.as_tensor(mine), torch.as_tensor(plain), atol=1e-12, rtol=0
        )


@pytest.mark.parametrize("algorithm", [SGD(lr=0.3), AdadpLR(lr=0.2, tol=0.5)], ids=repr)
def test_frozen_parameters_stay_put_where_clients_train_alone(algorithm: LocalAlgorithm) -> None:
    changed = []
    for path in ("layered", "plain"):
        model = make_mlp(dtype=torch.float64)
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        linear[0].weight.requires_grad_(False)
        linear[-1].bias.requires_grad_(False)
        changed.append(trained(path, algorithm, model=model)[0])
    torch.testing.assert_close(*changed, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", ["nothing", "a layer in between", "a bias"])
@pytest.mark.parametrize("kernel", ["compiled", "eager"])
def test_lengths_and_distances_from_factors_are_those_of_gradients_written_down(
    frozen: str, kernel: str
) -> None:
    model = nn.Sequential(
        nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 8, bias=False), nn.ReLU(), nn.Linear(8, 5)
    ).double()
    model[2].requires_grad_(frozen != "a layer in between")
    model[4].bias.requires_grad_(frozen != "a bias")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    packing = Packing(Layout.of(trainable))
    path = lowered(reading_of(model, (12,)), packing, kernel)
    assert path is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 12, dtype=torch.float64, generator=generator)
    targets = torch.arange(12).view(2, 6) % 5
    losses = prepare_losses(path.loss, targets, torch.full((2, 6), 1 / 6).double())
    theta = packing.pack(packing.layout.flatten(trainable).detach()[None])
    first, second = (
        path.batch_gradient(theta, x[batch : batch + 1], losses, batch) for batch in (0, 1)
    )
    difference = second.dense() - first.dense()
    torch.testing.assert_close(second.distance(first), torch.linalg.vector_norm(difference, dim=1))
    torch.testing.assert_close(first.norms(), torch.linalg.vector_norm(first.dense(), dim=1))
    assert second.distance(second) == 0

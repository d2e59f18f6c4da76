"""Convolutions and dense layers by hand: the plain path's numbers, and what is left to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clients_helpers import as_trained, joined, make_data, reading_of
from torch import nn

from fedsim.clients import SGD, AdadpLR, LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.kernels import convolutions
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.packing import Packing
from fedsim.training import Trainer
from fedsim.training.paths import conv_layers
from fedsim.training.paths.program import lowered
from fedsim.training.probe import gradient_methods

SIZES = [9, 0, 4, 1]
IDS = np.arange(len(SIZES))


def network(dtype: torch.dtype, *, pool_first: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    pooled = [nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        *(pooled[::-1] if pool_first else pooled),
        nn.Conv2d(4, 6, (2, 1), bias=False, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 7),
        nn.Tanh(),
        nn.Linear(7, 3, bias=False),
    )
    return model.to(dtype)


def trained(path: str, algorithm: LocalAlgorithm, rounds: int = 1, **changes: object) -> tuple:
    dtype = changes.pop("dtype", torch.float64)
    settings = {
        "model": network(dtype),
        "data": make_data(SIZES, features=2 * 11 * 11, shape=(2, 11, 11), dtype=dtype),
        "batch_size": 4,
        "epochs": 2,
        "randomness": Randomness(3),
    } | changes
    trainer = Trainer(algorithm=algorithm, path=path, **settings)
    vector = trainer.initial()
    for t in range(1, rounds + 1):
        rows, metrics = joined(trainer.train(vector, IDS, t))
        vector = vector + rows.mean(0)
    return rows, vector, metrics["loss"]


@pytest.mark.spanning
@pytest.mark.parametrize(
    "algorithm",
    [
        SGD(lr=0.3),
        SGD(lr=0.3, momentum=0.9),
        AdadpLR(lr=0.2, tol=0.5),
        AdadpLR(lr=0.2, tol=0.5, keep="half"),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "settings", [{}, {"pool": True}, {"frozen": True}, {"max_grad_norm": 0.1}], ids=repr
)
def test_the_layered_path_agrees_with_the_plain_path(
    algorithm: LocalAlgorithm, settings: dict[str, object]
) -> None:
    results = []
    for path in ("layered", "plain"):
        changes = dict(settings)
        model = network(torch.float64, pool_first=changes.pop("pool", False))
        model[0].requires_grad_(not changes.pop("frozen", False))
        changes["model"] = model
        results.append(trained(path, algorithm, rounds=10, **changes))
    for mine, plain in zip(*results, strict=True):
        torch.testing.assert_close(
            torch.as_tensor(mine), torch.as_tensor(plain), rtol=0, atol=1e-10
        )


def test_one_layered_step_in_single_precision_agrees_with_the_plain_path() -> None:
    changes = {"dtype": torch.float32, "steps": 1, "epochs": None}
    mine, plain = (trained(path, SGD(lr=0.3), **changes)[0] for path in ("layered", "plain"))
    torch.testing.assert_close(mine, plain, rtol=0, atol=1e-5)


@pytest.mark.skipif(convolutions._compiled() is None, reason="there is no C compiler")
def test_both_kernels_train_to_the_same_numbers(monkeypatch) -> None:
    model = nn.Sequential(
        *(nn.Conv2d(2, 5, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(5, 6, (3, 5), padding=(1, 2), bias=False), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(6, 6, 2), nn.MaxPool2d(1), nn.ReLU()),  # pooling that throws nothing away
        *(nn.Flatten(), nn.Linear(6, 3)),
    )
    taken = []
    sums = conv_layers.weight_gradient
    monkeypatch.setattr(
        conv_layers, "weight_gradient", lambda *given: taken.append(1) or sums(*given)
    )
    changes = {"dtype": torch.float32, "model": model, "steps": 1, "epochs": None}
    rows = [
        trained("layered", SGD(lr=0.3), kernel=kernel, **changes)[0]
        for kernel in ("compiled", "eager")
    ]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-5)
    assert len(taken) == 2 * sum(size > 0 for size in SIZES)


@pytest.mark.skipif(convolutions._compiled() is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("pool", "side", "sparse"),
    [(nn.MaxPool2d(3, 2), 14, True), (nn.MaxPool2d(3, 2), 32, True), (nn.MaxPool2d(2), 10, False)],
)
def test_overlapping_windows_of_a_three_by_three_convolution_are_summed_over_their_winners(
    pool: nn.MaxPool2d, side: int, sparse: bool
) -> None:
    module = nn.Conv2d(3, 4, 3, bias=False)
    size = module.weight.numel()
    layer = conv_layers.ConvLayer("conv", module, slice(0, size), None, nn.ReLU, pool)
    row, x = module.weight.detach().flatten(), torch.randn(2, 3, side, side)
    (past,) = conv_layers.forward([layer], row, x, compiled=True)
    assert conv_layers._uses_winners(past) is sparse


def test_the_rule_takes_the_layered_path_for_convolutions_on_a_cpu() -> None:
    data = make_data(SIZES, features=2 * 11 * 11, shape=(2, 11, 11))
    trainer = Trainer(network(torch.float32), SGD(lr=0.1), data, randomness=Randomness(0))
    assert (trainer.path.name, trainer.block_size) == ("layered", 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.insert(1, nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
        lambda model: model.pop(1),
        lambda model: model[3].requires_grad_(False),
        lambda model: setattr(model[0], "padding_mode", "circular"),
    ],
)
def test_what_the_rule_does_not_cover_is_not_layered(change) -> None:
    model = network(torch.float32)
    change(model)
    trained_ones = {k: p for k, p in model.named_parameters() if p.requires_grad}
    assert lowered(reading_of(model, (2, 11, 11)), Packing(Layout.of(trained_ones))) is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [
        ("eager", torch.float32, 1e-5),
        ("eager", torch.float64, 1e-13),
        ("compiled", torch.float32, 1e-5),
    ],
)
def test_outputs_are_the_models_at_each_clients_parameters(
    frozen, kernel, dtype, tolerance
) -> None:
    model = network(dtype, pool_first=True)
    model[0].requires_grad_(not frozen)
    trained_ones = {k: p for k, p in model.named_parameters() if p.requires_grad}
    packing = Packing(Layout.of(trained_ones))
    program = lowered(reading_of(model, (2, 11, 11)), packing, kernel)
    assert program is not None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, packing.layout.d, generator=generator, dtype=dtype)
    x = torch.randn(3, 4, 2, 11, 11, generator=generator, dtype=dtype)
    made = program.outputs(packing.pack(rows), x)
    for row, images, outputs in zip(rows, x, made, strict=True):
        expected = torch.func.functional_call(model, packing.layout.unflatten(row), (images,))
        torch.testing.assert_close(outputs, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_examples_gradients_are_those_of_one_example_at_a_time(frozen: bool, groups: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
        *(nn.Conv2d(4, 6, (2, 1), dilation=(2, 1), groups=groups, bias=False), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(18, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)),
    ).double()
    model[0].requires_grad_(not frozen)
    trained_ones = {k: p for k, p in model.named_parameters() if p.requires_grad}
    packing, reading = Packing(Layout.of(trained_ones)), reading_of(model, (2, 11, 11))
    program = lowered(reading, packing)
    assert program is not None
    methods = gradient_methods(as_trained(model, packing, reading, program))
    # Grouped weights meet some of the channels: no product of whole inputs with output gradients.
    assert [method.name for method in methods] == [
        *(["layered"] if groups == 1 else []),
        "vmapped",
        "one by one",
    ]
    theta = packing.pack(packing.layout.flatten(trained_ones).detach()[None])[0]
    x = torch.randn(5, 2, 11, 11, dtype=torch.float64)
    y = torch.arange(5) % 3
    results = [method.of_client(theta, x, y) for method in methods]
    for rows, losses in results[:-1]:
        torch.testing.assert_close(rows.dense(), results[-1][0].dense(), rtol=0, atol=1e-12)
        torch.testing.assert_close(losses, results[-1][1], rtol=0, atol=1e-12)


def test_a_model_that_is_no_chain_is_not_layered() -> None:
    with pytest.raises(FedsimError, match="'layered' does not take a LayerNorm"):
        Trainer(
            nn.LayerNorm(6), SGD(lr=0.1), make_data([3]), path="layered", randomness=Randomness(0)
        )

"""A client's bits do not depend on its place in a block, whatever function its model is made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_data
from torch import nn

from fedsim.clients import SGD, AdadpLR, Adam
from fedsim.randomness import Randomness
from fedsim.rows.packing import power, powers_of, sigmoid_
from fedsim.tasks import CrossEntropy
from fedsim.training import Trainer
from fedsim.training.paths.losses import prepare_losses

SIZES = [5, 9, 4, 12, 7]
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda v: power(v, 0.3), lambda v: v**0.3),
        (lambda v: power(v, 0.5), lambda v: v**0.5),
        (lambda v: power(v, 1.0), lambda v: v),
        (lambda v: powers_of(0.999, v), lambda v: 0.999**v),
        (lambda v: powers_of(0.0, v), lambda v: 0 * v),
        (lambda v: sigmoid_((v - 2).clone()), lambda v: 1 / (1 + np.exp(2 - v))),
        (lambda v: torch.exp(-v), lambda v: np.exp(-v)),
        (lambda v: torch.log(2 + v), lambda v: np.log(2 + v)),
    ],
    ids=["power", "root", "copy", "powers", "powers-of-zero", "sigmoid", "exp", "log"],
)
def test_a_part_has_the_bits_that_it_has_in_the_whole(dtype, function, expected) -> None:
    values = 4 * torch.rand(4099, generator=torch.Generator().manual_seed(1), dtype=dtype) + 1e-3
    whole = function(values)
    wanted = torch.from_numpy(expected(values.double().numpy())).to(dtype)
    torch.testing.assert_close(whole, wanted, rtol=4 * torch.finfo(dtype).eps, atol=0)
    for size in (1, 7, 37):
        for start in range(0, 4099 - size, 5 * size):
            part = slice(start, start + size)
            assert torch.equal(function(values[part].clone()), whole[part])


@pytest.mark.parametrize("classes", [2, 3, 10, 17, 65])
def test_losses_in_float64_have_the_bits_that_a_client_has_alone(classes) -> None:
    draws = torch.Generator().manual_seed(classes)
    outputs = 8 * torch.randn(5, 7, classes, generator=draws, dtype=torch.float64)
    y = torch.randint(classes, (5, 7), generator=draws)
    weight = torch.rand(5, 7, generator=draws, dtype=torch.float64)
    gaps = torch.empty(5, 7, classes + 3, dtype=torch.float64)[..., 1 : classes + 1].copy_(outputs)
    alone = prepare_losses(CrossEntropy(), y, weight)
    wanted = torch.cat([alone.deltas(outputs[k : k + 1].clone(), k) for k in range(5)])
    for block in (outputs, gaps):
        together = prepare_losses(CrossEntropy(), y, weight)
        assert torch.equal(together.deltas(block, 0), wanted)
        assert torch.equal(together.values(), alone.values())


def rows(model, algorithm, path, dtype, block_size, classes):
    data = make_data(SIZES, features=16, classes=classes, dtype=dtype)
    trainer = Trainer(
        model.to(dtype), algorithm, data, batch_size=4, steps=15, path=path,
        block_size=block_size, randomness=Randomness(3),
    )  # fmt: skip
    return joined(trainer.train(trainer.initial(), np.arange(len(SIZES)), 1))[0]


def model_of(activation, hidden, classes):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, hidden), activation(), nn.Linear(hidden, classes))


@pytest.mark.spanning
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "hidden", "classes", "algorithm", "path"),
    [
        (nn.Sigmoid, 4, 3, SGD(lr=0.5), "layered"),
        (nn.Sigmoid, 2, 3, SGD(lr=0.5), "layered"),
        (nn.ReLU, 5, 3, Adam(lr=0.1), "layered"),
        (nn.Tanh, 5, 3, AdadpLR(tol=0.3, exponent=0.3), "layered"),
        *[
            (activation, hidden, 16, SGD(lr=0.5), "func")
            for hidden in (1, 3)
            for activation in (nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.Mish)
        ],
    ],
)
def test_in_blocks_of_any_size(activation, hidden, classes, algorithm, path, dtype) -> None:
    def trained(block_size):
        model = model_of(activation, hidden, classes)
        return rows(model, algorithm, path, dtype, block_size, classes)

    alone = trained(1)
    for block_size in (2, 3, 5):
        assert torch.equal(trained(block_size), alone)

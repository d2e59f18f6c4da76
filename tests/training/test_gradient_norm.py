"""Shortened batch gradients against PyTorch's own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import joined, make_cnn, make_data, make_mlp

from fedsim import RunConfig
from fedsim.clients import SGD, Adam, Proximal
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Draws, Randomness
from fedsim.runs.resolve import resolve
from fedsim.training import ExamplePrivacy, Trainer

SIZES = [9, 0, 4, 1, 12, 7]
IDS = np.arange(len(SIZES))


def rows_of(trainer: Trainer) -> torch.Tensor:
    return joined(trainer.train(trainer.initial(), IDS, 1))[0]


def loop(model, data, client: int, bound: float) -> torch.Tensor:
    """Two passes, as anyone would write them."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.1)
    examples = data.indices[client]
    draws = Draws(Randomness(3), level="example", amplified=False, client=client)
    for epoch in range(2 if len(examples) else 0):
        order = examples[draws.generator(1, epoch).permutation(len(examples))]
        order = order if len(examples) > 4 else examples
        for start in range(0, len(order), 4):
            batch = torch.from_numpy(order[start : start + 4])
            optimizer.zero_grad()
            F.cross_entropy(trained(data.x[batch]), data.y[batch]).backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), bound)
            optimizer.step()
    pairs = zip(trained.parameters(), model.parameters(), strict=True)
    return torch.cat([(after - before).detach().reshape(-1) for after, before in pairs])


@pytest.mark.parametrize("path", ["plain", "func", "layered"])
@pytest.mark.parametrize("bound", [0.05, 0.6, 100.0])
def test_every_path_shortens_a_batchs_gradient_as_clip_grad_norm_does(
    path: str, bound: float
) -> None:
    data = make_data(SIZES, dtype=torch.float64)
    blocks = []
    for block_size in (1, 6):
        trainer = Trainer(
            make_mlp(dtype=torch.float64),
            Adam(lr=0.1),
            data,
            batch_size=4,
            epochs=2,
            path=path,
            block_size=block_size,
            randomness=Randomness(3),
            max_grad_norm=bound,
        )
        blocks.append(rows_of(trainer))
    assert torch.equal(*blocks)
    expected = torch.stack([loop(trainer.model, data, client, bound) for client in IDS])
    torch.testing.assert_close(blocks[0], expected, rtol=0, atol=1e-10)


def test_convolutions_have_theirs_shortened_too() -> None:
    data = make_data(SIZES, features=36, dtype=torch.float64, shape=(1, 6, 6))
    model = make_cnn(dtype=torch.float64)
    trainer = Trainer(
        model,
        Adam(lr=0.1),
        data,
        batch_size=4,
        epochs=2,
        randomness=Randomness(3),
        max_grad_norm=0.1,
    )
    expected = torch.stack([loop(model, data, client, 0.1) for client in IDS])
    torch.testing.assert_close(rows_of(trainer), expected, rtol=0, atol=1e-10)


def test_a_step_is_no_longer_than_the_rate_times_the_bound_before_a_proximal_pull() -> None:
    data = make_data([5, 5, 5, 5, 5, 5], dtype=torch.float64)
    trainer = Trainer(
        make_mlp(dtype=torch.float64),
        Proximal(SGD(lr=0.5), mu=10.0),
        data,
        batch_size=0,
        steps=1,
        randomness=Randomness(3),
        max_grad_norm=0.01,
    )
    norms = torch.linalg.vector_norm(rows_of(trainer), dim=1)
    assert (norms <= 0.5 * 0.01).all()
    assert (norms > 0.5 * 0.01 * 0.99).all()


def test_a_config_sets_it_and_example_level_privacy_refuses_it() -> None:
    config = RunConfig().replace(**{"client.max-grad-norm": 0.25})
    assert resolve(config).trainer.max_grad_norm == 0.25
    protected = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
    with pytest.raises(FedsimError, match=r"client\.max-grad-norm is 0\.25; it must be 0 where"):
        config.replace(**protected)
    with pytest.raises(FedsimError, match=r"client\.max-grad-norm"):
        Trainer(
            make_mlp(),
            SGD(lr=0.1),
            make_data(SIZES),
            batch_size=1,
            randomness=Randomness(3),
            max_grad_norm=1.0,
            privacy=ExamplePrivacy(Clipping(1.0), 1.0),
        )

"""Models of several inputs by name: every path, at both levels, against a plain loop."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from clients_helpers import joined
from torch import nn

from fedsim.clients import SGD
from fedsim.datasets import NamedTensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.tasks.losses import CrossEntropy, SquaredError
from fedsim.training import ClientData, ExamplePrivacy, Trainer
from fedsim.training.probe import Probe, gradient_methods

SIZES = (5, 8, 1, 0, 6)


class Factors(nn.Module):
    """Matrix factorisation: a rating by the user's factors and the item's."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(7, 4), nn.Embedding(5, 4)

    def forward(self, user, item, scale=1.5):
        return scale * (self.users(user) * self.items(item)).sum(-1)


class ImageAndTable(nn.Module):
    """A convolution on images, of which a mask says which pixels count, beside a table."""

    def __init__(self):
        super().__init__()
        self.conv, self.table, self.head = nn.Conv2d(3, 4, 3), nn.Linear(5, 4), nn.Linear(20, 3)

    def forward(self, table, image, mask):
        image = image * mask.unsqueeze(1)
        seen = nn.functional.max_pool2d(self.conv(image).relu(), 3)
        return self.head(torch.cat([seen.flatten(1), self.table(table).tanh()], 1))


class Words(nn.Module):
    """The mean embedding of the tokens that a mask of whole numbers keeps."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, attention_mask, input_ids):
        kept = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        return self.head(kept.sum(1) / attention_mask.sum(1, keepdim=True))


class Keywords(nn.Module):
    """As `Words`, by a forward that names none of its inputs: it has no graph."""

    def __init__(self):
        super().__init__()
        self.words = Words()

    def forward(self, **inputs):
        return self.words(**inputs)


def words(draws, n):
    mask = torch.arange(6) < torch.randint(1, 7, (n, 1), generator=draws)
    ids = torch.randint(11, (n, 6), generator=draws)
    return {"input_ids": ids, "attention_mask": mask.long()}


MODELS = {
    "factors": (
        Factors,
        lambda draws, n: {
            "user": torch.randint(7, (n,), generator=draws),
            "item": torch.randint(5, (n,), generator=draws, dtype=torch.int32),
        },
        SquaredError(),
    ),
    "image and table": (
        ImageAndTable,
        lambda draws, n: {
            "image": torch.randint(256, (n, 3, 8, 8), generator=draws, dtype=torch.uint8),
            "table": torch.randn(n, 5, generator=draws, dtype=torch.float64),
            "mask": torch.rand(n, 8, 8, generator=draws) > 0.3,
        },
        CrossEntropy(),
    ),
    "words": (Words, words, CrossEntropy()),
    "keywords": (Keywords, words, CrossEntropy()),
}


def case(name):
    """Model, clients' data and loss."""
    make, inputs, loss = MODELS[name]
    draws = torch.Generator().manual_seed(3)
    n = sum(SIZES)
    x = NamedTensors(inputs(draws, n))
    y = torch.randint(3, (n,), generator=draws)
    parts = np.split(np.random.default_rng(0).permutation(n), np.cumsum(SIZES)[:-1])
    torch.manual_seed(0)
    model = make().double()
    targets = y.double() if isinstance(loss, SquaredError) else y
    return model, ClientData(x, targets, parts), loss


def batch_of(data, rows):
    """What a plain loop would give a model: a dict."""
    rows = torch.from_numpy(rows)
    batch = {k: t[rows] for k, t in data.x.tensors.items()}
    for k, t in batch.items():
        if t.dtype == torch.uint8:
            batch[k] = t.double() / 255
        elif t.dtype != torch.bool:
            batch[k] = t.double() if t.is_floating_point() else t.long()
    return batch, data.y[rows]


@pytest.mark.parametrize("path", ["plain", "func", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_every_path_gives_the_update_of_a_plain_loop(name, path):
    model, data, loss = case(name)
    if name == "keywords" and path == "func":
        with pytest.raises(FedsimError, match="not name its input 'attention_mask'"):
            Trainer(model, SGD(lr=0.1), data, loss=loss, path=path, randomness=Randomness(1))
        return
    trainer = Trainer(
        model, SGD(lr=0.1), data, batch_size=0, steps=3, loss=loss, path=path, metrics={},
        randomness=Randomness(1),
    )  # fmt: skip
    rows, _ = joined(trainer.train(trainer.initial(), np.arange(len(SIZES)), 1))
    for client, part in enumerate(data.indices):
        looped = copy.deepcopy(model)
        optimiser = torch.optim.SGD(looped.parameters(), lr=0.1)
        for _ in range(3 if len(part) else 0):
            batch, y = batch_of(data, part)
            optimiser.zero_grad()
            loss(looped(**batch), y).mean().backward()
            optimiser.step()
        update = torch.cat([p.detach().flatten() for p in looped.parameters()])
        torch.testing.assert_close(rows[client], update - trainer.initial(), rtol=1e-10, atol=1e-12)
    evaluated = joined(trainer.evaluate(trainer.initial(), np.arange(len(SIZES)), 1))[1]
    for client, part in enumerate(data.indices):
        if len(part):
            batch, y = batch_of(data, part)
            assert evaluated["loss"][client] == pytest.approx(
                float(loss(model(**batch), y).mean().detach())
            )


@pytest.mark.parametrize("name", MODELS)
def test_each_method_gives_each_examples_own_gradient(name):
    model, data, loss = case(name)
    privacy = ExamplePrivacy(Clipping(clip_norm=1.0), noise_multiplier=1.0)
    settings = {"batch_size": 4, "steps": 1, "loss": loss, "metrics": {}, "privacy": privacy}
    trainer = Trainer(model, SGD(lr=0.1), data, randomness=Randomness(1), **settings)
    methods = gradient_methods(trainer.trained)
    fastest = Probe(trainer.trained).fastest(methods)
    expected = {
        "factors": "vmapped",
        "image and table": "factored",
        "words": "vmapped",
        "keywords": "vmapped",
    }
    assert fastest.name == expected[name]
    index = torch.arange(6)
    x, y = data.inputs(index, torch.float64), data.targets(index, torch.float64)
    theta = trainer.packing.pack(trainer.initial()[None])[0]
    for method in methods:
        rows, losses = method.of_client(theta, x, y)
        if method.takes_blocks:  # two clients at once, as on a GPU
            halves = data.inputs(index.view(2, 3), torch.float64)
            block, _ = method.block_rows(theta.expand(2, -1), halves, y.view(2, 3))
            both = block.dense().flatten(0, 1)
            torch.testing.assert_close(both, rows.dense()[0], rtol=1e-9, atol=1e-12)
        for j in range(6):
            batch, target = batch_of(data, np.array([j]))
            looped = copy.deepcopy(model)
            own = loss(looped(**batch), target)
            own.sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in looped.parameters()])
            torch.testing.assert_close(rows.dense()[0, j], gradient, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(losses[j], own[0].detach())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("private", [False, True])
def test_a_clients_bytes_do_not_depend_on_its_block(name, private):
    model, data, loss = case(name)
    privacy = ExamplePrivacy(Clipping(clip_norm=1.0), noise_multiplier=1.0) if private else None
    found = []
    for block_size in (1, 2, 5):
        trainer = Trainer(
            copy.deepcopy(model), SGD(lr=0.1), data, batch_size=3, steps=4, loss=loss, metrics={},
            privacy=privacy, block_size=block_size, randomness=Randomness(1),
        )  # fmt: skip
        rows, _ = joined(trainer.train(trainer.initial(), np.arange(len(SIZES)), 1))
        found.append(rows)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert bool(found[0][:3].any(dim=1).all())


def test_names_are_passed_on_by_copies_and_pickles():
    model, data, loss = case("words")
    trainer = Trainer(model, SGD(lr=0.1), data, loss=loss, path="func", randomness=Randomness(1))
    other = pickle.loads(pickle.dumps(trainer))
    blocks = [t.train(t.initial(), np.arange(2), 1) for t in (trainer, other)]
    assert torch.equal(joined(blocks[0])[0], joined(blocks[1])[0])
    batch, _ = batch_of(data, np.arange(4))
    torch.testing.assert_close(model(NamedTensors(batch)), model(**batch))
    assert [*copy.deepcopy(model).state_dict()] == [*Words().state_dict()]


class MixesMasks(Words):
    def forward(self, attention_mask, input_ids):
        return super().forward(attention_mask.amax(0, keepdim=True) * attention_mask, input_ids) * (
            attention_mask.float().mean()
        )


def test_a_model_that_mixes_one_of_its_inputs_is_refused_at_example_level():
    _, data, loss = case("words")
    privacy = ExamplePrivacy(Clipping(clip_norm=1.0), noise_multiplier=1.0)
    with pytest.raises(FedsimError, match="mixes examples"):
        Trainer(
            MixesMasks().double(), SGD(lr=0.1), data, loss=loss, privacy=privacy, steps=1,
            randomness=Randomness(1),
        )  # fmt: skip


def test_functions_of_torch_act_on_each_tensor():
    x = NamedTensors({"b": torch.arange(6).reshape(3, 2), "a": torch.arange(3)})
    both = torch.cat([x[:1], x[1:2]])
    assert both["b"].tolist() == [[0, 1], [2, 3]]
    assert [*both.tensors] == ["a", "b"]
    assert [len(x), x.shape, x.nbytes] == [3, (3,), 72]
    assert [row["a"].item() for row in x.unbind()] == [0, 1, 2]

"""A BatchNorm that stays in evaluation mode is a map of each example by itself."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_data
from torch import nn

import fedsim
from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.models import (
    fix_normalisation,
    keep_statistics,
    localise,
    refuse_running_statistics,
)
from fedsim.randomness import Randomness
from fedsim.training import ExamplePrivacy, Trainer
from fedsim.training.probe import Probe, gradient_methods


class Features(nn.Module):
    """Pre-trained features, frozen, and a head."""

    def __init__(self, stays=True, frozen=True):
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        self.head, self.stays = nn.Linear(5, 3), stays
        self.body[1].running_mean += torch.randn(5)
        self.body[1].running_var *= 3.0
        if frozen:
            self.body.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if self.stays:
            self.body.eval()
        return self

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def affine(model):
    """The same model with the layer written as the linear map that it is."""
    norm = model.body[1]
    scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
    twin = Features()
    twin.body[1] = linear = nn.Linear(5, 5)
    linear.weight.data = torch.diag(scale)
    linear.bias.data = norm.bias.detach() - norm.running_mean * scale
    twin.body.requires_grad_(False)
    return twin


@pytest.mark.parametrize("privacy", [None, ExamplePrivacy(Clipping(0.3), 0.0)])
def test_features_in_evaluation_mode_train_as_the_affine_map_that_they_are(privacy):
    rows = []
    for model in (Features(), affine(Features())):
        trainer = Trainer(
            model, SGD(lr=0.3), make_data([20, 9, 14]), batch_size=5, steps=6,
            randomness=Randomness(1, "ab"), privacy=privacy,
        )  # fmt: skip
        before = {name: value.clone() for name, value in model.named_buffers()}
        for number in (1, 2):
            row, _ = joined(trainer.train(trainer.initial(), np.arange(3), number))
            list(trainer.evaluate(trainer.initial(), np.arange(3), number))
        rows.append(row)
        assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-5)
    assert rows[0].abs().max() > 0.01
    refuse_running_statistics(Features())


def test_a_layer_that_goes_into_training_mode_is_refused_with_advice_that_keeps_its_features():
    def make(model):
        Trainer(model, SGD(lr=0.1), make_data([9]), randomness=Randomness(1))

    with pytest.raises(
        FedsimError, match=r"'body.1' .* not trained.* evaluation mode, by their eval\(\)"
    ):
        make(Features(stays=False))
    with pytest.raises(FedsimError, match=r"'body.1' .* mixes examples .* model.fix = true"):
        make(Features(stays=False, frozen=False))
    with pytest.raises(FedsimError, match=r"body.1 .*pre-trained, keep them as they are"):
        refuse_running_statistics(Features(stays=False))
    no_statistics = Features()
    no_statistics.body[1] = nn.BatchNorm1d(5, track_running_stats=False)
    with pytest.raises(FedsimError, match="mixes examples"):
        make(no_statistics)


class Images(nn.Module):
    """Convolutions between BatchNorms, of which one has no scale, and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 4, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)])
        self.head = nn.Linear(16, 3)
        for norm in self.norms:
            norm.eval().running_mean += torch.linspace(-1, 1, 4)
            norm.running_var *= torch.linspace(0.5, 2, 4)

    def forward(self, x):
        x = self.norms[0](self.first(x)).relu()
        return self.head(self.norms[1](self.second(x)).flatten(1))


@pytest.mark.parametrize("trains_scale", [False, True])
def test_a_layer_in_evaluation_mode_is_one_like_others(trains_scale):
    torch.manual_seed(0)
    plain = Images().double()
    plain.norms.requires_grad_(trains_scale)
    model = copy.deepcopy(plain)
    assert keep_statistics(model) == ["norms.0", "norms.1"]
    assert model.state_dict().keys() == plain.state_dict().keys()
    data = make_data([6, 9, 0], 36, dtype=torch.float64, shape=(1, 6, 6))
    method = "vmapped" if trains_scale else "factored"
    privacy = ExamplePrivacy(Clipping(1e3), 0.0)
    for chosen in (None, privacy):
        trainer = Trainer(
            copy.deepcopy(model), SGD(lr=0.1), data, batch_size=0, steps=3, privacy=chosen,
            randomness=Randomness(1, "ab"),
        )  # fmt: skip
        assert trainer.trained.reading.structure is not None
        if chosen is not None:
            assert Probe(trainer.trained).fastest(gradient_methods(trainer.trained)).name == method
        rows, _ = joined(trainer.train(trainer.initial(), np.arange(3), 1))
        for client, part in enumerate(data.indices[:2]):
            # Evaluation mode is that of the layers alone: the plain loop never calls train().
            looped = copy.deepcopy(plain)
            trained = [p for p in looped.parameters() if p.requires_grad]
            for _ in range(3):
                loss = nn.functional.cross_entropy(looped(data.x[part]), data.y[part])
                gradients = torch.autograd.grad(loss, trained)
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter.data -= 0.1 * gradient
            update = torch.cat([p.detach().flatten() for p in trained]) - trainer.initial()
            # At example level batches are Poisson draws: all of a client's at rate 1.
            torch.testing.assert_close(rows[client], update, rtol=1e-8, atol=1e-10)
        statistics = dict(trainer.model.named_buffers())
        assert all(torch.equal(statistics[k], v) for k, v in plain.named_buffers())


@pytest.mark.parametrize(
    "privacy",
    [
        {"mechanism.name": "clipping", "noise.multiplier": 1.0},
        {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0},
    ],
    ids=["clients", "examples"],
)
def test_a_private_run_keeps_the_statistics_that_a_model_came_with(privacy, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    config = {"rounds": 2, "partition.clients": 5, **privacy}
    run = fedsim.RunConfig.from_run_config(config)
    with pytest.raises(FedsimError, match="BatchNorm1d"):
        fedsim.run(run, model=model)
    model[1].eval().requires_grad_(False).running_mean += 0.1
    out = tmp_path / "run"
    fedsim.run(run, model=model, out=out)
    before = copy.deepcopy(model)
    notes = json.loads((out / "summary.json").read_text())["notes"]
    assert "The statistics of 1, in evaluation mode, stay as they are." in notes
    saved = fedsim.load(out, model=model)
    assert torch.equal(saved.trained[1].running_mean, before[1].running_mean)
    assert not torch.equal(saved.trained[0].weight, before[0].weight)
    x = torch.ones(2, 64)
    torch.testing.assert_close(model(x), saved.model(x))  # the model given is filled
    assert any(
        "by structure" in line for s in saved.record.statements for line in s.sentences()
    ) == ("client.mechanism.name" in privacy)


class Activated(nn.BatchNorm2d):
    """A subclass that also activates, as some packages' layers do."""

    def forward(self, x):
        return torch.relu(super().forward(x))


def with_hook():
    layer = nn.BatchNorm2d(2)
    layer.register_forward_hook(lambda module, inputs, outputs: outputs.relu())
    return layer


def with_a_forward_of_its_own():
    layer = nn.BatchNorm2d(2)
    layer.forward = torch.relu
    return layer


@pytest.mark.parametrize("make", [lambda: Activated(2), with_hook, with_a_forward_of_its_own])
def test_a_layer_that_does_more_than_normalise_is_not_replaced_by_one_that_does_not(make):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), make(), nn.Conv2d(2, 2, 3)).eval()
    x = torch.randn(4, 1, 8, 8)
    before = model(x)
    assert keep_statistics(model) == []
    assert torch.equal(model(x), before)
    with pytest.raises(FedsimError, match=r"'1' is a .* more than a BatchNorm, or has hooks"):
        localise(model, ["1.weight", "1.bias"])
    with pytest.raises(FedsimError, match=r"cannot replace 1 .* own layers, without hooks"):
        fix_normalisation(model)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fixed_layer_is_as_precise_as_torchs_where_means_are_large(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(8)).eval()
    model[0].running_mean += 30.0
    model[0].running_var *= torch.linspace(0.5, 2, 8)
    model.to(dtype)
    x = (30 + torch.randn(16, 8, 5, 5)).to(dtype)
    exact = copy.deepcopy(model).double()(x.double())
    allowed = (model(x) - exact).abs().max()
    assert keep_statistics(model) == ["0"]
    assert model(x).dtype == dtype
    assert (model(x) - exact).abs().max() <= 3 * allowed

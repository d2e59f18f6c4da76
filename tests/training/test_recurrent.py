"""Recurrent layers written out in products, beside torch's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cuda_helpers import DEVICES, assert_captured, on_device, rounds
from torch import nn

from fedsim.clients import SGD
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.training import ClientData, ExamplePrivacy, Trainer
from fedsim.training.paths.dropout import DropoutPath
from fedsim.training.paths.examples import VmapMethod
from fedsim.training.paths.path_choice import choose
from fedsim.training.paths.recurrent import Products, with_products

KINDS = {
    "rnn": lambda *sizes, **settings: nn.RNN(*sizes, **settings),
    "relu": lambda *sizes, **settings: nn.RNN(*sizes, nonlinearity="relu", **settings),
    "gru": nn.GRU,
    "lstm": nn.LSTM,
}
SETTINGS = [
    {},
    {"batch_first": True, "num_layers": 2},
    {"bidirectional": True, "bias": False},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_products_give_what_torchs_layer_gives(kind, settings):
    torch.manual_seed(0)
    layer = KINDS[kind](5, 4, **settings).double()
    ours = Products(layer)
    assert [*dict(ours.named_parameters())] == [*dict(layer.named_parameters())]
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    batch = 6 if layer.batch_first else 3
    count = layer.num_layers * (1 + layer.bidirectional)
    start = torch.randn(2, count, batch, 4, dtype=torch.float64)
    given = tuple(start) if kind == "lstm" else start[0]
    for arguments in ((x,), (x, given)):
        for one, other in zip(ours(*arguments), layer(*arguments), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Tokens(nn.Module):
    def __init__(self, kind, layers):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.layer = KINDS[kind](6, 5, num_layers=layers, batch_first=True)
        self.output = nn.Linear(5, 3)

    def forward(self, x):
        outputs, _ = self.layer(self.embedding(x))
        return self.output(outputs[:, -1])


def trainer_of(kind, path, layers=1, **settings):
    torch.manual_seed(1)
    x = torch.randint(20, (30, 7))
    data = ClientData(x, x.sum(1) % 3, [np.arange(9), np.arange(9, 14), np.arange(14, 30)])
    return Trainer(
        Tokens(kind, layers).double(), SGD(lr=0.3), data, batch_size=4, path=path,
        randomness=Randomness(0), **{"epochs": 2} | settings,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "layers"), [("rnn", 1), ("gru", 1), ("lstm", 2)])
def test_the_path_func_trains_as_torchs_layer_does(kind, layers):
    func, plain = trainer_of(kind, "func", layers), trainer_of(kind, "plain", layers)
    assert func.path.name == "func"
    found, expected = (rounds(t, t.initial(), [range(3)])[0] for t in (func, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    one, other = (
        np.concatenate([b.metrics["loss"] for b in t.evaluate(t.initial(), np.arange(3), 1)])
        for t in (func, plain)
    )
    np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize(("kind", "layers"), [("gru", 1), ("lstm", 2)])
@pytest.mark.parametrize("private", [False, True])
def test_a_block_on_a_gpu_trains_as_a_loop_over_clients(
    monkeypatch, private, kind, layers, captured, device
):
    """Beside torch's own layer, or with protected examples Opacus's, one client after another."""
    own = {"privacy": ExamplePrivacy(Clipping(0.5), 0.7), "epochs": None, "steps": 3}
    own = own if private else {}
    cohorts = [range(3), [0, 2], range(3)]

    def make(device):
        path, place = ("plain", "cpu") if device == "loop" else ("func", device)
        trainer = trainer_of(kind, path, layers, device=place, **own)
        if private and device == "cpu":  # the probe has seen that it is none
            products = with_products(trainer.trained.reading.structure.module)
            method = trainer.rounds.private.method
            method = VmapMethod(products, method.packing, method.loss, None)
            trainer.rounds.private = dataclasses.replace(trainer.rounds.private, method=method)
        return trainer

    for module in ("local_rounds", "trainer"):
        monkeypatch.setattr(f"fedsim.training.{module}.draws_on_device", lambda *_: True)
    loop = make("loop")
    expected = rounds(loop, loop.initial(), cohorts)
    trainer, vector = on_device(monkeypatch, device, make, captured=captured)
    found = rounds(trainer, vector, cohorts)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if private else 1e-10)
    if captured:
        assert_captured(trainer)


def test_the_rule_takes_it_on_a_gpu_alone_and_dropout_between_layers_only_by_masks():
    trained = trainer_of("gru", "auto").trained
    assert trainer_of("gru", "auto").path.name == "plain"
    assert choose("auto", trained, torch.device("cuda")).name == "func"
    structure = trained.reading.structure.module
    assert with_products(structure) is not None
    next(m for m in structure.modules() if isinstance(m, nn.GRU)).dropout = 0.5
    assert with_products(structure) is None
    assert with_products(structure, masked=True) is not None


def test_dropout_after_a_recurrent_layer_is_taken_too():
    def dropping(path, p):
        torch.manual_seed(1)
        model = nn.Sequential(Tokens("gru", 1), nn.Dropout(p), nn.Linear(3, 3)).double()
        x = torch.randint(20, (12, 7))
        data = ClientData(x, x.sum(1) % 3, [np.arange(6), np.arange(6, 12)])
        return Trainer(model, SGD(lr=0.3), data, batch_size=3, path=path, randomness=Randomness(0))

    few, none = dropping("func", 1e-12), dropping("plain", 0.0)
    assert type(few.path) is DropoutPath
    for one, other in zip(
        few.train(few.initial(), np.arange(2), 1),
        none.train(none.initial(), np.arange(2), 1),
        strict=True,
    ):
        torch.testing.assert_close(one.rows, other.rows, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_rows_of_examples_are_those_of_the_method_on_a_cpu(kind):
    privacy = ExamplePrivacy(Clipping(1.0), 1.0)
    trainer = trainer_of(kind, "auto", privacy=privacy, epochs=None, steps=1)
    trained = trainer.trained
    structure, loss = trained.reading.structure, trained.reading.loss
    method = VmapMethod(with_products(structure.module), trained.packing, loss, None)
    theta = trainer.packing.pack(trainer.initial()[None]).expand(2, -1).clone()
    theta[1] += 0.1
    x, y = trainer.data.x[:8].view(2, 4, 7), trainer.data.y[:8].view(2, 4)
    found, losses = method.block_rows(theta, x, y)
    for k in range(2):
        own, own_losses = trainer.rounds.private.method.of_client(theta[k], x[k], y[k])
        torch.testing.assert_close(found.dense()[k], own.dense()[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(losses[k], own_losses, rtol=0, atol=1e-10)

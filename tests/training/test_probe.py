"""Rows of examples are believed once they have been tried; what mixes examples is refused."""

from __future__ import annotations

import copy
import logging
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import joined, make_cnn, make_data, make_mlp
from torch import nn

from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.tasks.losses import CrossEntropy
from fedsim.training import ExamplePrivacy, Trainer

SIZES = [9, 12]


class Wrapped(nn.Module):
    """A linear layer with something done to its inputs and outputs."""

    def __init__(self, before=lambda x: x, after=lambda x: x):
        super().__init__()
        self.before, self.after = before, after
        self.linear = nn.Linear(12, 3)

    def forward(self, x):
        return self.after(self.linear(self.before(x)))


class Tokens(nn.Module):
    """``[B, 12]`` as three tokens of four features, which a layer of sequences sees."""

    def __init__(self, layer, width=4):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x):
        seen = self.layer(x.view(len(x), 3, 4))
        return self.head((seen[0] if isinstance(seen, tuple) else seen)[:, -1])


class Folded(nn.Module):
    """Puts its tokens beside each other in the batch, and takes them apart again."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Linear(4, 2), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.token(x.reshape(-1, 4))).view(len(x), 6))


class Positional(nn.Module):
    """Three tokens first and then the batch: what a layer has in dimension 0 is no example."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens
        self.token, self.head = nn.Linear(60 // tokens, 2), nn.Linear(2 * tokens, 3)

    def forward(self, x):
        tokens = x.view(len(x), self.tokens, -1).transpose(0, 1)
        return self.head(torch.tanh(self.token(tokens)).transpose(0, 1).flatten(1))


class Itemised(nn.Module):
    """Asks a parameter for its value."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.norm(x)) * (1.0 if x.sum().item() == x.sum() else 2.0)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.square, self.head = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.square(torch.tanh(self.square(x)))))


class Scaled(nn.Module):
    """A model with a parameter that is in no layer."""

    def __init__(self, model):
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * self.model(x)


def transformer(batch_first):
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=batch_first)


CROSS_ENTROPY = CrossEntropy()


def private(model, *, loss=CROSS_ENTROPY, features=12, seed=0, **settings):
    torch.manual_seed(seed)
    data = settings.pop("data", None) or make_data(SIZES, features=features)
    return Trainer(
        model, SGD(lr=0.1), data, batch_size=4, loss=loss, randomness=Randomness(1),
        privacy=ExamplePrivacy(Clipping(0.5), 0.0), **settings,
    )  # fmt: skip


MIXING_MODELS = {
    "x - x.mean(0)": lambda: Wrapped(before=lambda x: x - x.mean(0)),
    "standardised outputs": lambda: Wrapped(after=lambda y: (y - y.mean(0)) / (y.var(0) + 1e-3)),
    "largest input": lambda: Wrapped(before=lambda x: x / x.abs().max()),
    "softmax over the batch": lambda: Wrapped(after=lambda y: y.softmax(0)),
    "shifted": lambda: Wrapped(after=lambda y: y + 0.01 * y.roll(1, 0)),
    "divided by its size": lambda: Wrapped(after=lambda y: y / len(y)),
    "sequence-first transformer": lambda: Tokens(transformer(False)),
    "sequence-first LSTM": lambda: Tokens(nn.LSTM(4, 4)),
    "stateless batch norm": lambda: Wrapped(
        after=lambda y: F.batch_norm(y, None, None, training=True)
    ),
}


@pytest.mark.parametrize("name", MIXING_MODELS)
def test_a_model_that_mixes_examples_is_refused_in_a_sentence(name):
    with pytest.raises(FedsimError, match=r"mixes examples: the (output|loss) of one depends"):
        private(MIXING_MODELS[name]())


MIXING_LOSSES = {
    "batch mean": lambda outputs, y: CrossEntropy()(outputs, y) - CrossEntropy()(outputs, y).mean(),
    "standardised": lambda outputs, y: CrossEntropy()(outputs - outputs.mean(0), y),
    "mean": lambda outputs, y: CrossEntropy()(outputs, y) / len(y),
    "contrastive": lambda outputs, y: (outputs @ outputs.T).logsumexp(1),
}


@pytest.mark.parametrize("name", MIXING_LOSSES)
@pytest.mark.parametrize("make", [lambda: make_mlp(12), lambda: Tokens(transformer(True))])
def test_a_loss_that_mixes_examples_is_refused_in_a_sentence(name, make):
    with pytest.raises(FedsimError, match=r"loss mixes examples: the loss of one depends"):
        private(make(), loss=MIXING_LOSSES[name])


def test_a_loss_that_is_one_number_for_a_batch_is_refused():
    with pytest.raises(FedsimError, match="one number for each"):
        private(make_mlp(12), loss=F.cross_entropy)


def test_batch_norm_is_refused_with_the_cure():
    with pytest.raises(FedsimError, match="GroupNorm"):
        private(nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))


WAYS = {
    "mlp": (lambda: make_mlp(12), "layered"),
    "a linear layer in a class": (lambda: Wrapped(), "layered"),
    "functions behind linear": (lambda: Wrapped(after=lambda y: 2 * y.tanh()), "factored"),
    "layers used twice": (Twice, "vmapped"),
    "folded tokens": (Folded, "vmapped"),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 12), nn.Linear(12, 3)), "vmapped"),
    "transformer": (lambda: Tokens(transformer(True)), "vmapped"),
    "rnn": (lambda: Tokens(nn.RNN(4, 4, batch_first=True)), "unrolled"),
    "gru": (lambda: Tokens(nn.GRU(4, 4, batch_first=True)), "unrolled"),
    "lstm": (lambda: Tokens(nn.LSTM(4, 4, batch_first=True)), "unrolled"),
    "deep two-way lstm": (
        lambda: Tokens(nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True), 8),
        "unrolled",
    ),
    "deep two-way rnn with relu": (
        lambda: Tokens(
            nn.RNN(4, 4, 2, nonlinearity="relu", batch_first=True, bidirectional=True), 8
        ),
        "unrolled",
    ),
    "gru without biases": (
        lambda: Tokens(nn.GRU(4, 4, batch_first=True, bias=False)),
        "unrolled",
    ),
    "gru between layers": (
        lambda: nn.Sequential(nn.LayerNorm(12), Tokens(nn.GRU(4, 4, batch_first=True))),
        "unrolled",
    ),
    "gru beside a parameter of its own": (
        lambda: Scaled(Tokens(nn.GRU(4, 4, batch_first=True))),
        "one by one",
    ),
    ".item()": (Itemised, "one by one"),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_fastest_way_that_is_true_is_taken_and_all_give_the_clients_own_gradients(name, caplog):
    make, way = WAYS[name]
    torch.manual_seed(3)
    with caplog.at_level(logging.WARNING, "fedsim"):
        trainer = private(make())
    assert trainer.rounds.private.method.name == way
    assert len([r for r in caplog.records if "one by one" in r.message]) == (way == "one by one")
    theta = trainer.packing.pack(trainer.initial()[None])
    x, y = trainer.data.x[None, :6], trainer.data.y[None, :6]
    (examples,) = trainer.rounds.private.method.rows(theta, x, y, [6], None)
    model = trainer.model
    for j in range(6):
        loss = CrossEntropy()(model(x[0, j : j + 1]), y[0, j : j + 1]).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        row = torch.cat([gradient.flatten() for gradient in gradients])
        torch.testing.assert_close(examples.rows.dense()[0, j], row, rtol=1e-4, atol=1e-6)
    rows = [next(trainer.train(trainer.initial(), np.array([k]), 1)).rows for k in (0, 1)]
    both = joined(trainer.train(trainer.initial(), np.arange(2), 1))[0]
    assert torch.equal(torch.cat(rows), both)


@pytest.mark.parametrize("tokens", [3, 5, 6])
def test_what_lies_in_dimension_0_of_a_layer_must_be_the_example(tokens):
    trainer = private(Positional(tokens), features=60)
    assert trainer.rounds.private.method.name == "vmapped"


def test_opacus_dropout_within_a_recurrent_layer_is_not_torchs_and_is_not_taken():
    trainer = private(Tokens(nn.GRU(4, 4, 2, dropout=0.5, batch_first=True)))
    assert trainer.rounds.private.method.name == "one by one"


def test_frozen_parts_of_a_recurrent_model_have_no_gradient():
    model = Tokens(nn.GRU(4, 4, batch_first=True))
    model.layer.weight_ih_l0.requires_grad_(False)
    trainer = private(model)
    assert trainer.rounds.private.method.name == "unrolled"
    assert "layer.weight_ih_l0" not in [entry.name for entry in trainer.layout.entries]


def test_only_recurrent_layers_need_opacus(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "opacus"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opacus", None)  # importing it raises
    assert private(Tokens(transformer(True))).rounds.private.method.name == "vmapped"
    assert (
        private(Tokens(nn.GRU(4, 4, batch_first=True))).rounds.private.method.name == "one by one"
    )


def test_no_example_moves_the_sum_by_more_than_c_in_any_model_that_is_taken():
    for make, _ in WAYS.values():
        torch.manual_seed(3)
        trainer = private(make())
        theta = trainer.packing.pack(trainer.initial()[None])
        x, y = trainer.data.x[None, :6] * 50, trainer.data.y[None, :6]
        (examples,) = trainer.rounds.private.method.rows(theta, x, y, [6], None)
        dense = examples.rows.dense()[0].double()
        norms = torch.linalg.vector_norm(dense, dim=1)
        torch.testing.assert_close(examples.rows.norms()[0], norms, rtol=1e-4, atol=1e-6)


def test_a_model_that_takes_no_example_alone_is_refused():
    model = Wrapped(before=lambda x: x.squeeze(), after=lambda y: y.view(-1, 3)[: len(y)])
    model.after = lambda y: y if y.dim() == 2 else torch.zeros(2, 3) + y
    with pytest.raises(FedsimError, match=r"one example alone|mixes examples"):
        private(model)


def test_the_probe_looks_at_nobodys_data():
    looked = []

    class Watching(Wrapped):
        def forward(self, x):
            if isinstance(x, torch.Tensor):  # and not a node of the graph that is read
                looked.append(x.detach().clone())
            return super().forward(x)

    data = make_data(SIZES, features=12)
    private(Watching(), data=data)
    assert looked
    rows = {row.numpy().tobytes() for row in data.x}
    assert not any(row.numpy().tobytes() in rows for x in looked for row in x.view(-1, 12))


def test_without_example_level_privacy_examples_may_be_mixed():
    for make in MIXING_MODELS.values():
        torch.manual_seed(3)
        trainer = Trainer(
            make(), SGD(lr=0.1), make_data(SIZES, features=12), randomness=Randomness(1)
        )
        assert torch.isfinite(next(trainer.train(trainer.initial(), np.arange(2), 1)).rows).all()


def test_convolutions_and_tokens_are_probed_too():
    images = make_data(SIZES, features=36, shape=(1, 6, 6))
    assert private(make_cnn(), data=images).rounds.private.method.name == "layered"
    tokens = make_data(SIZES, features=12)
    tokens = type(tokens)(torch.randint(7, (21, 5)), tokens.y, tokens.indices)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3))
    assert private(model, data=tokens).rounds.private.method.name == "vmapped"


class Logarithm(Wrapped):
    """Takes positive numbers only, and mixes them."""

    def forward(self, x):
        h = super().forward(x.log())
        return h - h.mean(0)


def test_what_hides_behind_nan_is_looked_at_with_other_numbers():
    with pytest.raises(FedsimError, match="mixes examples"):
        private(Logarithm())


class Lengths(nn.Module):
    """Takes lengths of sequences, which are above zero."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        if bool((x == 0).any()):
            raise ValueError("a sequence of length 0")
        return self.linear(x.float())


def test_whole_numbers_that_a_model_does_not_take_are_tried_from_one_on():
    data = make_data(SIZES, features=12)
    data = type(data)(torch.randint(1, 7, (21, 5)), data.y, data.indices)
    # Its forward branches on values: nothing can be read.
    assert private(Lengths(), data=data).rounds.private.method.name == "one by one"


def test_a_model_that_cannot_be_tried_is_refused_with_its_error():
    def never(outputs, y):
        raise RuntimeError("on purpose")

    with pytest.raises(FedsimError, match=r"made-up examples \(RuntimeError: on purpose\)"):
        private(make_mlp(12), loss=never)


class InHalfPrecision(nn.Module):
    """A frozen recurrent layer in bfloat16, of which batches of other sizes round otherwise."""

    def __init__(self, share):
        super().__init__()
        self.frozen = nn.GRU(4, 32, batch_first=True).bfloat16().requires_grad_(False)
        self.head, self.share = nn.Linear(32, 3), share

    def forward(self, x):
        last = self.frozen(x.view(len(x), 3, 4).bfloat16())[0][:, -1].float()
        return self.head(last) / (len(x) if self.share else 1)


@pytest.mark.parametrize("share", [False, True])
def test_rounding_in_half_precision_is_told_from_mixed_examples(share):
    torch.manual_seed(0)
    model = InHalfPrecision(share)
    x, own = torch.randn(5, 12), copy.deepcopy(model)
    assert share or 1e-5 < (own(x)[:1] - own(x[:1])).abs().max() < 0.01

    def make():
        return Trainer(
            model, SGD(lr=1.0), make_data(SIZES, 12), batch_size=4, steps=1,
            randomness=Randomness(1, "ab"), privacy=ExamplePrivacy(Clipping(0.3), 0.0),
        )  # fmt: skip

    if share:
        with pytest.raises(FedsimError, match="how many examples there are"):
            make()
        return
    rows, _ = joined(make().train(make().initial(), np.arange(2), 1))
    assert ((rows.norm(dim=1) > 0.01) & (rows.norm(dim=1) <= 0.3)).all()

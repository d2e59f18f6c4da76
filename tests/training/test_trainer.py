"""The cohort trainer against a loop in plain PyTorch, and against itself in other blocks."""

from __future__ import annotations

import copy
import importlib
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import joined, make_cnn, make_data, make_mlp
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import hypothesis_examples
from torch import nn

import fedsim.training.paths
from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Draws, Randomness
from fedsim.training import ClientData, ExamplePrivacy, Trainer
from fedsim.training.batches import batch_width

SIZES = [9, 0, 4, 1, 12, 7, 4]
IDS = np.arange(len(SIZES))


def trainer_of(path="auto", *, model=None, data=None, algorithm=None, dtype=torch.float32, **kw):
    kw = {"batch_size": 4, "epochs": 2, "randomness": Randomness(3)} | kw
    return Trainer(
        model or make_mlp(dtype=dtype),
        algorithm or SGD(lr=0.3),
        data or make_data(SIZES, dtype=dtype),
        path=path,
        **kw,
    )


def rows_of(trainer, ids=IDS, round=1, vector=None):
    vector = trainer.initial() if vector is None else vector
    return joined(trainer.train(vector, ids, round), ids)


def loop(model, data, client, *, lr, batch, epochs, seed, round, momentum=0.0, weight_decay=0.0):
    """The same local work, as anyone would write it."""
    model = copy.deepcopy(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay
    )
    own = data.indices[client]
    draws = Draws(Randomness(seed), level="example", amplified=False, client=client)
    for epoch in range(epochs if len(own) else 0):
        order = own[draws.generator(round, epoch).permutation(len(own))]
        order = order if batch < len(own) else own
        for start in range(0, len(own), batch):
            at = torch.from_numpy(order[start : start + batch])
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[at]), data.y[at]).backward()
            optimizer.step()
    return torch.cat(
        [(p.detach() - b).reshape(-1) for p, b in zip(model.parameters(), before, strict=True)]
    )


@pytest.mark.parametrize("path", ["plain", "func", "layered"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_path_does_what_a_plain_pytorch_loop_does(path, momentum):
    data = make_data(SIZES, dtype=torch.float64)
    settings = {"momentum": momentum, "weight_decay": 0.01 if momentum else 0.0}
    trainer = trainer_of(path, data=data, dtype=torch.float64, algorithm=SGD(lr=0.3, **settings))
    rows, _ = rows_of(trainer)
    for client in IDS:
        expected = loop(
            trainer.model, data, client, lr=0.3, batch=4, epochs=2, seed=3, round=1, **settings
        )
        torch.testing.assert_close(rows[client], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", ["func", "layered"])
@pytest.mark.parametrize(
    ("dtype", "rounds", "tolerance"),
    [
        (torch.float32, 1, 1e-5),
        (torch.float64, 10, 1e-10),
    ],
)
def test_paths_agree_with_the_plain_path(path, dtype, rounds, tolerance):
    results = []
    for name in ("plain", path):
        trainer = trainer_of(
            name, dtype=dtype, **({"steps": 1, "epochs": None} if rounds == 1 else {})
        )
        vector = trainer.initial()
        for t in range(1, rounds + 1):
            rows, _ = rows_of(trainer, round=t, vector=vector)
            vector = vector + rows.mean(0)
        results.append(rows if rounds == 1 else vector)
    torch.testing.assert_close(*results, rtol=0, atol=tolerance)


@pytest.mark.spanning
@pytest.mark.parametrize("path", ["plain", "func", "layered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_and_metrics_have_the_same_bytes_for_any_block_size(path, dtype):
    sizes = list(np.random.default_rng(0).integers(0, 14, 23))
    data = make_data(sizes, features=37, dtype=dtype)
    reference = None
    for block_size in (1, 2, 5, 23):
        trainer = trainer_of(
            path, model=make_mlp(37, 19, dtype=dtype), data=data, block_size=block_size
        )
        rows, metrics = rows_of(trainer, np.arange(23))
        if reference is None:
            reference = rows, metrics
        assert torch.equal(rows, reference[0])
        for name, column in metrics.items():
            assert np.array_equal(column, reference[1][name]), name


@pytest.mark.spanning
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("features", "hidden"), [(48, 32), (784, 64), (16, 16)])
def test_dense_models_have_the_same_bytes_when_vmapped_in_blocks(dtype, features, hidden):
    sizes = list(np.random.default_rng(1).integers(0, 14, 13))
    data, model = (
        make_data(sizes, features, 4, dtype=dtype),
        make_mlp(features, hidden, 4, dtype=dtype),
    )
    rows = []
    for block_size in (1, 3, 13):
        trainer = trainer_of("func", model=model, data=data, block_size=block_size)
        assert trainer.path.aligned
        rows.append(rows_of(trainer)[0])
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@given(st.permutations(list(IDS)), st.integers(1, 7))
@hypothesis_examples(15)
def test_a_client_trains_alike_whoever_stands_beside_it(order, take):
    trainer = trainer_of()
    reference, _ = rows_of(trainer)
    ids = np.array(order[:take])
    rows, _ = rows_of(trainer, ids)
    assert torch.equal(rows, reference[ids])


def test_a_client_without_data_sends_zero_and_reports_no_examples():
    rows, metrics = rows_of(trainer_of())
    assert torch.equal(rows[1], torch.zeros_like(rows[1]))
    assert metrics["num-examples"][1] == 0
    assert metrics["loss"][1] == 0


def test_a_row_is_the_difference_in_the_models_dtype():
    trainer = trainer_of()
    vector = trainer.initial()
    local = trainer.fit(vector, IDS, 1)
    rows, _ = rows_of(trainer)
    assert torch.equal(rows, local.theta - vector)


def test_steps_wrap_around_short_clients():
    trainer = trainer_of(epochs=None, steps=5)
    blocks = trainer.rounds.blocks(IDS, 1, [Randomness(3)] * len(IDS), len(IDS))
    drawn = [clients.batches for _, clients in blocks if clients.batches is not None]
    assert len(drawn) > 1
    for batches in drawn:
        assert (batches.steps == 5).all()
        np.testing.assert_allclose(batches.weight.sum(2), 1.0)


def test_an_epoch_takes_every_example_once():
    trainer, seen = trainer_of(epochs=1), {}
    for _, clients in trainer.rounds.blocks(IDS, 1, [Randomness(0)] * len(IDS), 2):
        for row, client in enumerate(clients.client_ids.tolist() if clients.batches else ()):
            batches = clients.batches
            index, weight = (a[row, : batches.steps[row]] for a in (batches.index, batches.weight))
            seen[client] = sorted(index[weight > 0])
    assert seen == {k: sorted(trainer.data.indices[k]) for k in IDS if SIZES[k]}


def test_full_batch_steps_are_gradient_descent():
    data = make_data(SIZES, dtype=torch.float64)
    trainer = trainer_of(data=data, dtype=torch.float64, batch_size=0, epochs=3)
    rows, _ = rows_of(trainer)
    for client in (0, 4):
        expected = loop(trainer.model, data, client, lr=0.3, batch=99, epochs=3, seed=3, round=1)
        torch.testing.assert_close(rows[client], expected, rtol=0, atol=1e-12)


@given(st.integers(0, 40), st.integers(1, 200))
def test_a_batch_is_at_least_two_wide_and_holds_what_a_step_takes(batch_size, size):
    B = batch_width(batch_size, size)
    assert B >= 2
    taken = min(batch_size or size, size)
    assert taken <= B
    assert batch_size == B or max(2, 2 * taken - 1) >= B


def test_rates_may_differ_within_a_block():
    trainer = trainer_of()
    both = trainer.fit(trainer.initial(), np.array([0, 0]), 1, numbers={"lr": [0.3, 0.05]}).theta
    one = trainer_of(algorithm=SGD(lr=0.05)).fit(trainer.initial(), np.array([0]), 1).theta
    assert torch.equal(both[0], trainer.fit(trainer.initial(), np.array([0]), 1).theta[0])
    assert torch.equal(both[1], one[0])


@pytest.mark.parametrize("path", ["plain", "layered", "func"])
def test_evaluation_is_the_mean_over_each_clients_examples(path):
    trainer = trainer_of(path)
    vector = trainer.initial()
    (block,) = trainer.evaluate(vector, IDS, 1)
    for client in IDS:
        at = torch.from_numpy(trainer.data.indices[client])
        if not len(at):
            assert block.metrics["loss"][client] == 0
            continue
        outputs, y = trainer.model(trainer.data.x[at]), trainer.data.y[at]
        assert block.metrics["loss"][client] == pytest.approx(
            F.cross_entropy(outputs, y).item(), rel=1e-5
        )
        assert block.metrics["accuracy"][client] == pytest.approx(
            (outputs.argmax(1) == y).double().mean().item()
        )
    assert [b.metrics["loss"][0] for b in trainer.evaluate(vector, IDS[:1], 1)] == [
        block.metrics["loss"][0]
    ]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("mlp", {}),
        ("mlp", {"kernel": "eager"}),
        ("mlp", {"path": "func"}),
        ("cnn", {}),
        ("frozen", {}),
    ],
)
def test_evaluation_by_several_threads_is_that_by_one(model, settings):
    image = model == "cnn"
    net = make_cnn() if image else make_mlp()
    if model == "frozen":
        net[0].requires_grad_(False)
    sizes = [2501, 0, 70, 1333]
    data = make_data(sizes, **({"features": 36, "shape": (1, 6, 6)} if image else {}))
    found = []
    for threads in (1, 3):
        trainer = trainer_of(model=net, data=data, **settings)
        trainer.evaluation.threads = threads
        vector = trainer.initial()
        metrics = [
            next(trainer.evaluate(scale * vector, np.arange(4), 1)).metrics for scale in (1, 2, 1)
        ]
        found.append([(k, v.tobytes()) for of_call in metrics for k, v in of_call.items()])
    assert found[0] == found[1]
    (one, *others), _ = trainer.evaluation._paths
    assert len(others) == 2
    for other in others:
        pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
        assert all(p is q for p, q in pairs)
        assert not {*one.model.modules()} & {*other.model.modules()}


def test_an_evaluation_of_one_call_starts_no_thread(monkeypatch):
    trainer = trainer_of(data=make_data([1500]))
    trainer.evaluation.threads = 3
    (learned,) = trainer.evaluate(trainer.initial(), IDS[:1], 1)  # how large a call may be
    monkeypatch.setattr("threading.Thread.start", lambda _: pytest.fail("a thread was started"))
    (again,) = trainer.evaluate(trainer.initial(), IDS[:1], 1)
    assert again.metrics["loss"] == learned.metrics["loss"]


def test_uint8_images_are_scaled_and_normalised_when_gathered():
    x = torch.tensor([[[[0, 255]]], [[[51, 102]]]], dtype=torch.uint8)
    data = ClientData(
        x, torch.tensor([0, 1]), [np.array([0, 1])], mean=torch.tensor(0.5), std=torch.tensor(0.25)
    )
    got = data.inputs(torch.tensor([[1], [0]]), torch.float64)
    torch.testing.assert_close(
        got.reshape(2, 2), torch.tensor([[-1.2, -0.4], [-2.0, 2.0]], dtype=torch.float64)
    )
    assert data.x.dtype == torch.uint8


def test_every_tensor_of_the_data_is_put_on_the_device():
    x, y = torch.zeros(4, 2, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
    data = ClientData(
        x, y, [np.arange(4)], torch.zeros(2), torch.ones(2), torch.ones(4, dtype=torch.bool)
    )
    there = data.to("meta")
    for tensor in (there.x, there.y, there.mean, there.std, there.mask):
        assert tensor.device.type == "meta"
    assert there.to("meta") is there


def test_convolutions_on_a_cpu_go_one_client_at_a_time():
    data = make_data([8, 5, 9], features=36, shape=(1, 6, 6))
    plain = trainer_of("plain", model=make_cnn(), data=data, block_size=3)
    assert plain.block_size == 1
    func = trainer_of("func", model=make_cnn(), data=data)
    one, _ = rows_of(plain, np.arange(3))
    other, _ = rows_of(func, np.arange(3))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


class Residual(nn.Module):
    """Dense layers that are no Sequential."""

    def __init__(self, width=16):
        super().__init__()
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.head(x + torch.relu(self.body(x)))


def test_the_rule_chooses_by_model_alone():
    data = make_data([8, 5], features=16, classes=4)
    names = {
        "layered": make_mlp(16, 5, 4),
        "func": Residual(),
        "plain": nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4)),
    }
    for name, model in names.items():
        assert trainer_of("auto", model=model, data=data).path.name == name


@pytest.mark.parametrize(("pooled", "name"), [(True, "layered"), (False, "plain")])
def test_convolutions_are_layered_where_pooling_throws_places_away(pooled, name):
    data = make_data([8, 5], features=36, classes=4, shape=(1, 6, 6))
    pool = nn.MaxPool2d(2) if pooled else nn.Identity()
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), pool, nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(27 if pooled else 108, 4))
    assert trainer_of("auto", model=model, data=data).path.name == name
    assert trainer_of("layered", model=model, data=data).path.name == "layered"


def test_frozen_layers_are_neither_trained_nor_sent():
    data = make_data([8, 5, 9], features=36, shape=(1, 6, 6))
    model = make_cnn()
    model[0].requires_grad_(False)
    trainer = trainer_of("auto", model=model, data=data)
    assert trainer.path.name == "layered"
    assert [e.name for e in trainer.layout.entries] == ["4.weight", "4.bias"]
    rows, _ = rows_of(trainer, np.arange(3))
    plain, _ = rows_of(trainer_of("plain", model=model, data=data), np.arange(3))
    torch.testing.assert_close(rows, plain, rtol=0, atol=1e-5)


def test_a_frozen_first_or_last_dense_layer_stays_put():
    for frozen in (1, 3):
        model = make_mlp(dtype=torch.float64)
        model[frozen].requires_grad_(False)
        data = make_data(SIZES, dtype=torch.float64)
        layered, _ = rows_of(trainer_of("layered", model=model, data=data))
        plain, _ = rows_of(trainer_of("plain", model=model, data=data))
        torch.testing.assert_close(layered, plain, rtol=0, atol=1e-12)


def test_a_users_loss_trains_alike_on_every_path():
    def squared(outputs, targets):
        return (outputs - torch.eye(3, dtype=outputs.dtype)[targets]).square().sum(-1)

    rows = [
        rows_of(
            trainer_of(
                path, loss=squared, dtype=torch.float64, data=make_data(SIZES, dtype=torch.float64)
            )
        )[0]
        for path in ("plain", "func", "layered")
    ]
    torch.testing.assert_close(rows[1], rows[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(rows[2], rows[0], rtol=0, atol=1e-12)


def test_batch_norm_is_refused_with_the_cure():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with pytest.raises(FedsimError, match=r"GroupNorm.*model\.personal = '1\.\*'"):
        trainer_of(model=model)
    privacy = ExamplePrivacy(Clipping(1.0), 1.0)
    with pytest.raises(FedsimError, match=r"model\.fix = true replace it\."):
        trainer_of(model=model, privacy=privacy)


class Attention(nn.Module):
    """With an operation for which `torch.func.vmap` has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = x[:, None]
        return self.head(self.attention(x, x, x, need_weights=False)[0][:, 0])


def test_nothing_is_said_of_what_vmap_has_no_rule_for():
    importlib.reload(fedsim.training.paths)  # each test has warnings' filters of its own
    with warnings.catch_warnings(record=True) as said:
        trainer = trainer_of(model=Attention(), path="func")
        list(trainer.train(trainer.initial(), np.arange(2), 1))
        privacy = ExamplePrivacy(Clipping(1.0), 1.0)
        trainer = trainer_of(model=Attention(), privacy=privacy)
        list(trainer.train(trainer.initial(), np.arange(2), 1))
    assert [str(one.message) for one in said] == []


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"batch_size": -1}, "batch-size"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 1, "steps": 2}, "steps"),
        ({"block_size": -2}, "block-size"),
        ({"path": "fast"}, "path is"),
    ],
)
def test_bad_settings_are_named(bad, key):
    with pytest.raises(FedsimError, match=key):
        trainer_of(**bad)


def test_a_model_in_a_type_that_no_flower_array_carries_is_refused() -> None:
    model = make_mlp().bfloat16()
    with pytest.raises(FedsimError, match="bfloat16, which no Flower array carries"):
        Trainer(model, SGD(lr=0.1), make_data([4]), randomness=Randomness(1))

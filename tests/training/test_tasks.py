"""Data of every kind through every path: tokens and masks, numbers, vectors, labels."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import joined
from torch import Tensor, nn

from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.tasks import (
    AUC,
    F1,
    R2,
    Accuracy,
    BinaryCrossEntropy,
    CrossEntropy,
    Perplexity,
    SquaredError,
)
from fedsim.training import ClientData, ExamplePrivacy, Trainer

VOCABULARY, LENGTH = 7, 5
SIZES = (3, 1, 0, 12, 5)


class Bigrams(nn.Module):
    """A language model that vmap takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.hidden = nn.Linear(6, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


def parts() -> list[np.ndarray]:
    return [p.astype(np.int64) for p in np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])]


def tokens(dtype: torch.dtype = torch.int64) -> ClientData:
    """Sequences of unequal length; one of the examples has no position that counts."""
    n = sum(SIZES)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(VOCABULARY, (n, LENGTH), generator=generator).to(dtype)
    y = torch.randint(VOCABULARY, (n, LENGTH), generator=generator).to(dtype)
    lengths = torch.randint(1, LENGTH + 1, (n,), generator=generator)
    lengths[5] = 0
    return ClientData(x, y, parts(), mask=torch.arange(LENGTH) < lengths[:, None])


def numbers(width: int) -> ClientData:
    n = sum(SIZES)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 4, generator=generator)
    y = x @ torch.randn(4, max(width, 1), generator=generator)
    return ClientData(x, y if width else y[:, 0], parts())


def labels() -> ClientData:
    n = sum(SIZES)
    generator = torch.Generator().manual_seed(3)
    y = (torch.rand(n, 3, generator=generator) < 0.4).float()
    mask = torch.rand(n, 3, generator=generator) < 0.8
    return ClientData(torch.randn(n, 4, generator=generator), y, parts(), mask=mask)


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], ClientData], object, object]] = {
    "tokens": (Bigrams, tokens, CrossEntropy(), Perplexity()),
    "recurrent": (Recurrent, tokens, CrossEntropy(), Accuracy()),
    "number": (lambda: mlp(1), lambda: numbers(0), SquaredError(), R2()),
    "vector": (lambda: mlp(2), lambda: numbers(2), SquaredError(), R2()),
    "labels": (lambda: mlp(3), labels, BinaryCrossEntropy(), F1()),
}


def trainer(task: str, path: str = "plain", block_size: int = 0, **settings: object) -> Trainer:
    make, data, loss, metric = TASKS[task]
    torch.manual_seed(0)
    model = make()
    settings = {"dtype": torch.float32} | settings
    model = model.to(settings.pop("dtype"))
    return Trainer(
        model,
        SGD(lr=0.1),
        data(),
        batch_size=4,
        loss=loss,
        metrics={"metric": metric},
        randomness=Randomness(1),
        path=path,
        block_size=block_size,
        **{"epochs": 2, **settings},
    )


def rows(t: Trainer) -> Tensor:
    return joined(t.train(t.initial(), np.arange(len(SIZES)), 1))[0]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("path", ["func", "layered"])
def test_every_path_trains_every_kind_of_target_as_the_plain_one(task: str, path: str) -> None:
    if path == "layered" and task in ("tokens", "recurrent"):
        pytest.skip("no dense model")
    expected = rows(trainer(task))
    assert bool(expected.isfinite().all())
    assert expected[2].abs().sum() == 0
    torch.testing.assert_close(rows(trainer(task, path)), expected, rtol=1e-5, atol=1e-6)


def test_func_evaluates_a_recurrent_model_as_the_plain_path_does() -> None:
    one, other = (
        np.concatenate(
            [b.metrics["loss"] for b in t.evaluate(t.initial(), np.arange(len(SIZES)), 1)]
        )
        for t in (trainer("recurrent", "func"), trainer("recurrent", "plain"))
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_a_plain_step_is_a_loop_of_pytorch(task: str) -> None:
    """One full batch of one client, by hand: what does not count has no weight."""
    t = trainer(task, dtype=torch.float64, epochs=None, steps=1)
    t.workload.work = type(t.workload.work)(0, None, 1)
    data, client = t.data, 3
    own = torch.from_numpy(data.indices[client])
    x = data.x[own] if not data.x.is_floating_point() else data.x[own].double()
    outputs = t.model(x)
    total = torch.zeros((), dtype=torch.float64)
    for z, i in zip(outputs, own.tolist(), strict=True):
        y = data.y[i]
        keep = torch.ones(y.shape, dtype=torch.bool) if data.mask is None else data.mask[i]
        if not keep.any():
            continue
        if task in ("tokens", "recurrent"):
            total = total + F.cross_entropy(z[keep], y[keep])
        elif task == "labels":
            total = total + F.binary_cross_entropy_with_logits(z[keep], y[keep].double())
        else:
            total = total + F.mse_loss(z.reshape(y.shape), y.double())
    (total / len(own)).backward()
    step = torch.cat([p.grad.flatten() for p in t.model.parameters()]) * -0.1
    row = next(iter(t.train(t.initial(), np.array([client]), 1))).rows[0]
    torch.testing.assert_close(row, step, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_blocks_of_any_size_give_the_same_bytes_and_metrics(task: str) -> None:
    reference = trainer(task, "auto")
    expected, ids = rows(reference), np.arange(len(SIZES))
    (evaluated,) = reference.evaluate(reference.initial(), ids, 1)
    for size in (1, 3, 7):
        other = trainer(task, "auto", size)
        assert torch.equal(rows(other), expected)
        alone = [next(iter(other.evaluate(other.initial(), ids[k : k + 1], 1))) for k in ids]
        for name, column in evaluated.metrics.items():
            again = np.concatenate([block.metrics[name] for block in alone])
            np.testing.assert_array_equal(again, column)


@pytest.mark.parametrize("task", TASKS)
def test_examples_of_every_kind_can_be_protected(task: str) -> None:
    """Noise 0 and a bound that binds nobody: the plain gradient, of shuffled batches."""
    privacy = ExamplePrivacy(Clipping(1e6), 0.0, sampling="shuffle")
    protected = trainer(task, epochs=None, steps=1, privacy=privacy)
    plain = trainer(task, epochs=None, steps=1)
    for t in (protected, plain):
        t.workload.work = type(t.workload.work)(0, None, 1)
    torch.testing.assert_close(rows(protected), rows(plain), rtol=1e-4, atol=1e-6)
    bounded = trainer(task, privacy=ExamplePrivacy(Clipping(1e-3), 0.0))
    # Steps of 0.1 along the sum of at most 12 gradients of norm 0.001, over a denominator of 1.
    assert rows(bounded).norm(dim=1).max() <= 0.1 * 12 * 1e-3 * 20


def test_what_the_mask_leaves_out_moves_nothing() -> None:
    data = tokens()
    other = ClientData(data.x, torch.where(data.mask, data.y, 6), data.indices, mask=data.mask)
    first, second = trainer("tokens"), trainer("tokens")
    second.data = other
    second.stepper.data.__dict__["y"] = other.y
    assert torch.equal(rows(first), rows(second))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_tokens_of_fewer_bits_train_to_the_same_bytes(dtype: torch.dtype) -> None:
    wide, narrow = trainer("tokens"), trainer("tokens")
    narrow = Trainer(
        narrow.model,
        SGD(lr=0.1),
        tokens(dtype),
        batch_size=4,
        epochs=2,
        randomness=Randomness(1),
        path="plain",
        loss=CrossEntropy(),
        metrics={},
    )
    assert narrow.data.x.dtype == dtype
    assert torch.equal(rows(wide), rows(narrow))


def test_clients_evaluate_on_test_examples_of_their_own() -> None:
    t = trainer("number")
    whole = numbers(0)
    test = ClientData(whole.x, whole.y, [whole.indices[3], *whole.indices[1:]])
    own = Trainer(
        t.model, SGD(lr=0.1), whole, loss=SquaredError(), metrics={"r2": R2()}, test=test,
        randomness=Randomness(1),
    )  # fmt: skip
    ids = np.arange(len(SIZES))
    (ours,) = own.evaluate(own.initial(), ids, 1)
    (theirs,) = t.evaluate(t.initial(), ids, 1)
    assert ours.metrics["num-examples"].tolist() == [12, 1, 0, 12, 5]
    assert ours.metrics["r2"][0] == pytest.approx(theirs.metrics["metric"][3])
    assert math.isnan(ours.metrics["r2"][1])  # of one example there is no variance to explain
    with pytest.raises(FedsimError, match="test examples of 4 clients and training examples of 5"):
        Trainer(
            t.model, SGD(lr=0.1), whole, loss=SquaredError(), metrics={},
            test=ClientData(whole.x, whole.y, whole.indices[:4]), randomness=Randomness(1),
        )  # fmt: skip


def test_an_evaluation_of_large_outputs_goes_in_calls_of_bounded_size(monkeypatch) -> None:
    import fedsim.training.evaluation as evaluation

    t = trainer("tokens")
    ids = np.arange(len(SIZES))
    (expected,) = t.evaluate(t.initial(), ids, 1)
    calls = []
    real = evaluation.CallSize.learn
    monkeypatch.setattr(evaluation, "CALL_BYTES", 1)
    monkeypatch.setattr(
        evaluation.CallSize,
        "learn",
        lambda size, x, *rest: calls.append(len(x)) or real(size, x, *rest),
    )
    t = trainer("tokens")  # one that has not learnt yet what a call takes
    (again,) = t.evaluate(t.initial(), ids, 1)
    assert calls == [1] * 4
    np.testing.assert_array_equal(again.metrics["metric"], expected.metrics["metric"])


def test_auc_of_a_client_is_of_its_own_examples() -> None:
    n = sum(SIZES)
    x, y = torch.randn(n, 4), torch.arange(n) % 2
    t = Trainer(
        mlp(2), SGD(lr=0.1), ClientData(x, y, parts()), metrics={"auc": AUC()},
        randomness=Randomness(1),
    )  # fmt: skip
    (block,) = t.evaluate(t.initial(), np.arange(len(SIZES)), 1)
    z = t.model(x).detach()
    for client, own in enumerate(parts()):
        auc = block.metrics["auc"][client]
        if len(own) < 2:
            assert math.isnan(auc) or not len(own)
            continue
        score = (z[own, 1] - z[own, 0]).numpy()
        positive, negative = score[y[own] == 1], score[y[own] == 0]
        assert auc == np.mean(positive[:, None] > negative[None])

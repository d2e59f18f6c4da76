"""What a model draws by itself is its client's own, and repeats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import joined, make_data
from torch import nn
from toy_clients import training

from fedsim.clients import SGD, AdadpLR
from fedsim.errors import FedsimError
from fedsim.federation.engines.workers import guarded_blocks
from fedsim.mechanisms import Clipping
from fedsim.randomness import Purpose, Randomness
from fedsim.tasks.losses import CrossEntropy
from fedsim.training import ExamplePrivacy, Trainer
from fedsim.training.batches import local_multiplications
from fedsim.training.paths.func import FuncPath
from fedsim.training.side_effects import hidden_draws

SIZES = [5, 9, 4, 12]
IDS = np.arange(len(SIZES))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = x.view(len(x), 3, 4)
        return self.head(self.attention(x, x, x, need_weights=False)[0].flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.lstm(x.view(len(x), 3, 4))[0][:, -1])


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(F.dropout(torch.relu(self.first(x)), 0.4, self.training))


class Noisy(nn.Module):
    """Adds noise to its inputs, also when it is evaluated."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 3)

    def forward(self, x):
        return self.linear(x + 0.5 * torch.rand(x.shape, dtype=x.dtype))


def with_dropout():
    return nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))


def in_the_stem():
    frozen = nn.Linear(12, 6)
    frozen.requires_grad_(False)
    return nn.Sequential(frozen, nn.Dropout(0.5), nn.Linear(6, 3))


MODELS = {
    "attention": Attention, "lstm": Recurrent, "functional": Functional, "noisy": Noisy,
    "dropout": with_dropout, "frozen": in_the_stem,
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", MODELS)


def trainer_of(name, *, block_size=0, seed=1, **settings):
    torch.manual_seed(7)
    settings = {"batch_size": 4, "epochs": 2, "randomness": Randomness(seed)} | settings
    data = make_data(SIZES, features=12)
    return Trainer(MODELS[name](), SGD(lr=0.1), data, block_size=block_size, **settings)


def rows_of(trainer, round=1, ids=IDS):
    blocks = list(guarded_blocks(trainer, training(trainer.initial(), round), ids))
    assert all(block.ok.all() for block in blocks)
    return joined(blocks, ids)[0]


@EVERY
def test_rows_have_the_same_bytes_in_every_block_and_whatever_is_drawn_elsewhere(name):
    rows = rows_of(trainer_of(name))
    torch.rand(13)
    assert torch.equal(rows, rows_of(trainer_of(name)))
    assert torch.equal(rows, rows_of(trainer_of(name, block_size=1)))
    assert torch.equal(rows, rows_of(trainer_of(name, block_size=3)))
    backwards = rows_of(trainer_of(name), ids=IDS[::-1].copy())
    assert torch.equal(rows, backwards.flip(0))


@EVERY
def test_draws_differ_between_rounds_and_seeds_and_leave_the_global_generator_alone(name):
    trainer = trainer_of(name, batch_size=0)
    before = torch.get_rng_state()
    first, second = rows_of(trainer, 1), rows_of(trainer, 2)
    assert torch.equal(before, torch.get_rng_state())
    # Full batches: nothing else is drawn.
    assert not torch.equal(first, second)
    assert not torch.equal(first, rows_of(trainer_of(name, batch_size=0, seed=2)))


def test_a_step_is_a_plain_step_with_the_clients_own_dropout():
    trainer = trainer_of("dropout", batch_size=0, epochs=1)
    rows = rows_of(trainer, 3)
    model, data = trainer.model.train(), trainer.data
    x, y = data.x[torch.from_numpy(data.indices[2])], data.y[torch.from_numpy(data.indices[2])]
    draws = Randomness(1).generator(Purpose.DROPOUT, level="example", round=3, client=2, part=0)
    with torch.random.fork_rng():
        torch.manual_seed(int(draws.integers(2**63, size=1, dtype=np.uint64)[0]))
        loss = CrossEntropy()(model(x), y).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    step = -0.1 * torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(rows[2], step, rtol=1e-4, atol=1e-6)


def test_every_gradient_evaluation_draws_anew(monkeypatch):
    addresses = []
    monkeypatch.setattr(Randomness, "address_observer", staticmethod(addresses.append))
    data = make_data(SIZES, features=12)
    trainer = Trainer(
        Functional(), AdadpLR(lr=0.1), data, batch_size=4, steps=6, randomness=Randomness(1)
    )
    rows_of(trainer)
    drawn = [address.part for address in addresses if address.purpose == Purpose.DROPOUT]
    assert sorted(drawn) == sorted([*range(6)] * len(SIZES))
    assert len(set(addresses)) == len(addresses)


@EVERY
def test_an_evaluation_repeats_and_draws_only_what_the_model_draws_then(name):
    values = []
    for block_size in (0, 1):
        trainer = trainer_of(name, block_size=block_size)
        torch.rand(5)
        blocks = list(trainer.evaluate(trainer.initial(), IDS, 1))
        values.append(np.concatenate([block.metrics["loss"] for block in blocks]))
    assert np.array_equal(*values)
    others = list(trainer.evaluate(trainer.initial(), IDS, 2))
    assert np.array_equal(values[0], others[0].metrics["loss"]) == (name != "noisy")


@pytest.mark.spanning
@EVERY
@pytest.mark.parametrize("chunk", [0, 2])
def test_private_examples_of_a_model_that_draws_have_the_same_bytes_in_every_block(name, chunk):
    privacy = ExamplePrivacy(Clipping(0.5), 1.0, chunk=chunk)
    rows = rows_of(trainer_of(name, privacy=privacy))
    assert torch.equal(rows, rows_of(trainer_of(name, privacy=privacy, block_size=1)))
    assert torch.equal(rows, rows_of(trainer_of(name, privacy=privacy, block_size=3)))
    noiseless = ExamplePrivacy(Clipping(0.5), 0.0, chunk=chunk)
    trainer = trainer_of(name, privacy=noiseless, batch_size=0)
    assert not torch.equal(rows_of(trainer, 1), rows_of(trainer, 2))


@pytest.mark.parametrize(("path", "name"), [("func", "noisy"), ("layered", "dropout")])
def test_paths_that_cannot_lend_a_generator_to_one_client_refuse(path, name):
    with pytest.raises(FedsimError, match="draws random numbers"):
        trainer_of(name, path=path)


class FromNumpy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + float(np.random.rand())  # noqa: NPY002


class Counting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Remembering(nn.Linear):
    """Adds what it has seen before, which stands in no buffer."""

    seen: tuple[torch.Tensor, ...] = ()

    def forward(self, x):
        x = x + sum(self.seen)
        self.seen = (0.1 * x.detach().mean(),)
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (FromNumpy(12, 3), "numpy's or Python's"),
        (Counting(12, 3), "buffers calls"),
        (Remembering(12, 3), "after it has processed others"),
    ],
)
def test_models_that_cannot_be_repeated_are_refused(model, words):
    with pytest.raises(FedsimError, match=words):
        Trainer(model, SGD(lr=0.1), make_data(SIZES, features=12), randomness=Randomness(1))
    if isinstance(model, Counting):
        assert model.calls == 0


SCRATCH = torch.zeros(6)


class Writing(nn.Linear):
    """Writes a number of its inputs into a tensor of the module, and reads it where it is odd."""

    def forward(self, x):
        with torch.no_grad():
            SCRATCH.copy_(x.mean(0))
        return super().forward(x)


def writing_loss(outputs, y):
    SCRATCH[:3].add_(outputs.detach().mean(0))
    return F.cross_entropy(outputs, y, reduction="none")


class InPlace(nn.Linear):
    """Writes only into what it makes, and into a buffer of its own that it never reads."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scratch = torch.zeros(sizes[1])

    def forward(self, x):
        y = super().forward(x)
        self.scratch.copy_(y.detach().mean(0))
        return y.mul_(2.0).relu_()


def test_a_model_or_loss_that_writes_into_a_global_tensor_is_refused():
    for model, loss in ((Writing(6, 3), None), (nn.Linear(6, 3), writing_loss)):
        with pytest.raises(FedsimError, match=r"writes into a tensor that is not its own"):
            Trainer(model, SGD(0.1), make_data(SIZES), randomness=Randomness(1), loss=loss)
    Trainer(InPlace(6, 3), SGD(0.1), make_data(SIZES), randomness=Randomness(1))


class Centring(nn.Linear):
    """Writes to its inputs."""

    def forward(self, x):
        return super().forward(x.sub_(0.5))


def test_a_model_that_writes_to_its_inputs_is_not_taken_for_one_that_remembers():
    data = make_data(SIZES, features=12)
    assert not hidden_draws(Centring(12, 3), data.x[:4].clone()).training


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_which_few_paths_would_call_is_refused(method):
    model = nn.Linear(6, 3)
    getattr(model.weight, method)(lambda gradient: 0 * gradient)
    with pytest.raises(FedsimError, match="the model's weight has a hook on its gradient"):
        Trainer(model, SGD(lr=0.1), make_data(SIZES), randomness=Randomness(1))


def test_models_that_draw_are_known_without_data_too():
    assert hidden_draws(with_dropout(), None).training
    assert hidden_draws(Recurrent(), None).training
    assert not hidden_draws(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), None).training
    assert not hidden_draws(
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), torch.ones(2, 2)
    ).training


class Watching(nn.Linear):
    """Shows what it is given, and counts how often; a branch on values keeps it from being read."""

    shown: list[torch.Tensor] = []  # noqa: RUF012
    calls = 0

    def forward(self, x):
        self.calls += 1
        if isinstance(x, torch.Tensor):  # and no node of a graph
            self.shown.append(x.detach().clone())
        return super().forward(x if x.sum() > -torch.inf else -x)


def shows(shown: list[torch.Tensor], data: torch.Tensor) -> bool:
    """Whether an example of the data is among what was shown."""
    rows = torch.cat([x.reshape(-1, data.shape[1]) for x in shown])
    return bool((rows[:, None] == data[None]).all(2).any())


def test_a_model_is_tried_on_nobodys_examples_and_left_as_it_was():
    data, model = make_data([1, 3], features=12), Watching(12, 3)
    Watching.shown.clear()
    trainer = Trainer(model, SGD(lr=0.1), data, randomness=Randomness(1))
    local_multiplications(model, trainer.workload, torch.float32)
    assert len(Watching.shown) > 3
    assert not shows(Watching.shown, data.x)
    assert model.calls == 0


def test_the_func_path_is_tried_on_nobodys_examples(monkeypatch):
    tried, gradient = [], FuncPath.gradient
    monkeypatch.setattr(
        FuncPath, "gradient", lambda path, *given: tried.append(given[1]) or gradient(path, *given)
    )
    data = make_data(SIZES, features=12)
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16))
    trainer = Trainer(model, SGD(lr=0.1), data, randomness=Randomness(1))
    assert trainer.path.name == "func"
    assert tried
    assert not shows(tried, data.x)


def noisy(outputs, targets):
    """A loss that draws."""
    return F.cross_entropy(outputs + torch.randn_like(outputs), targets, reduction="none")


def from_numpy(outputs, targets):
    return F.cross_entropy(outputs * np.random.rand(), targets, reduction="none")  # noqa: NPY002


@pytest.mark.parametrize("privacy", [None, ExamplePrivacy(Clipping(0.5), 0.0)])
def test_a_loss_that_draws_gives_the_same_numbers_whatever_is_drawn_elsewhere(privacy):
    results = []
    for seed, block_size in ((0, 1), (1, 4)):
        torch.manual_seed(0)
        trainer = Trainer(
            nn.Linear(6, 3), SGD(lr=0.1), make_data(SIZES), loss=noisy, batch_size=4,
            block_size=block_size, privacy=privacy, randomness=Randomness(1),
        )  # fmt: skip
        torch.manual_seed(seed)
        rows, _ = joined(trainer.train(trainer.initial(), IDS, 1))
        _, metrics = joined(trainer.evaluate(trainer.initial(), IDS, 1))
        results.append((rows, metrics["loss"]))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1].tolist() == results[1][1].tolist()


def test_a_loss_that_draws_from_numpys_generator_is_refused():
    with pytest.raises(FedsimError, match="the loss draws from numpy's"):
        Trainer(
            nn.Linear(6, 3),
            SGD(lr=0.1),
            make_data(SIZES),
            loss=from_numpy,
            randomness=Randomness(1),
        )


def one_hot_loss(outputs, targets):
    """A loss that can be read, and that `torch.func` does not take."""
    return (outputs - F.one_hot(targets, 3)).square().sum(1)


def test_the_func_path_refuses_a_loss_that_torch_func_does_not_take(capfd, caplog):
    data, settings = make_data(SIZES), {"loss": one_hot_loss, "randomness": Randomness(1)}
    with pytest.raises(FedsimError, match=r"'func' does not take this Linear with .*vmap.*'plain'"):
        Trainer(nn.Linear(6, 3), SGD(lr=0.1), data, path="func", **settings)
    assert not caplog.records  # it does not train client by client
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    assert Trainer(model, SGD(lr=0.1), data, **settings).path.name == "plain"
    assert "Traceback" not in capfd.readouterr().err

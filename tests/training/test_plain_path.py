"""The plain path trains a client as a loop of one's own does, and gives the model back."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import make_data
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedsim.clients import SGD, AdadpLR
from fedsim.clients.base import DenseGradient, Gradient
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.training import ClientData, ExamplePrivacy, Trainer
from fedsim.training.own_state import OwnState
from fedsim.training.paths.examples import SingleExampleMethod
from fedsim.training.paths.plain import PlainPath
from fedsim.training.side_effects import Seeds

EXAMPLES, STEPS = 7, 4


def images(channels: int) -> ClientData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, channels, 9, 9, dtype=torch.float64, generator=generator)
    return ClientData(x, torch.arange(EXAMPLES) % 3, [np.arange(EXAMPLES)])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("norm", [nn.Identity(), nn.GroupNorm(2, 6)])
def test_filters_with_channels_last_or_first_train_as_in_a_plain_loop(
    channels: int, momentum: float, norm: nn.Module
) -> None:
    model = nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1), copy.deepcopy(norm), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(6, 6, 3, groups=3), nn.Flatten(), nn.Linear(24, 3),
    ).double()  # fmt: skip
    data = images(channels)
    trainer = Trainer(
        model, SGD(lr=0.1, momentum=momentum), data, batch_size=0, steps=STEPS, path="plain",
        randomness=Randomness(1),
    )  # fmt: skip
    vector = trainer.initial()
    places = [parameter.data_ptr() for parameter in trainer.model.parameters()]
    (block,) = trainer.train(vector, np.arange(1), 1)
    assert [parameter.data_ptr() for parameter in trainer.model.parameters()] == places
    assert torch.equal(trainer.initial(), vector)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=momentum)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(alone(data.x), data.y).backward()
        optimizer.step()
    ended = Layout.of(alone.state_dict()).flatten(dict(alone.named_parameters())).detach()
    torch.testing.assert_close(block.rows[0], ended - vector, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", ["plain", "func", "layered"])
def test_one_channel_and_a_stride_that_leaves_one_column_train_as_in_a_plain_loop(
    path: str,
) -> None:
    """Channels last, torch 2.15 convolves such images wrongly where oneDNN has AVX-512."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-2, 3, (EXAMPLES, 1, 6, 3), generator=generator).float()
    data = ClientData(x, torch.arange(EXAMPLES) % 3, [np.arange(EXAMPLES)])
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, (4, 3), stride=(1, 2), padding=(1, 0)),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, 3),
    )
    trainer = Trainer(
        model, SGD(lr=0.1), data, batch_size=0, steps=STEPS, path=path,
        randomness=Randomness(1),
    )  # fmt: skip
    (block,) = trainer.train(trainer.initial(), np.arange(1), 1)
    alone = copy.deepcopy(model).double()
    start = Layout.of(alone.state_dict()).flatten(dict(alone.named_parameters())).detach()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(alone(x.double()), data.y).backward()
        optimizer.step()
    ended = Layout.of(alone.state_dict()).flatten(dict(alone.named_parameters())).detach()
    torch.testing.assert_close(block.rows[0].double(), ended - start, rtol=0, atol=1e-5)


def test_a_client_s_seeds_are_the_same_drawn_together_or_step_by_step() -> None:
    seeds = Seeds([Randomness(3).for_replay()] * 2, np.array([5, 9]), 2)
    by_step = np.stack([seeds.of_step(step, 2)[:, 0] for step in range(STEPS)], axis=1)
    assert by_step.tolist() == [seeds.of_client(k, STEPS).tolist() for k in range(2)]
    assert len(set(by_step.ravel().tolist())) == 2 * STEPS


class WritesToInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.relu_())


def test_what_a_model_writes_to_its_inputs_is_not_the_data() -> None:
    x = torch.full((32, 4), -1.0)
    data = ClientData(x, torch.arange(32) % 3, [np.arange(32)])
    trainer = Trainer(
        WritesToInputs(), SGD(lr=0.1), data, batch_size=16, path="plain", randomness=Randomness(1)
    )
    (block,) = trainer.train(trainer.initial(), np.arange(1), 1)
    assert block.ok.all()
    assert (x == -1).all()


class Branching(nn.Module):
    """A model that uses one of two layers, as its batch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


def branching() -> tuple[Gradient, list[Gradient]]:
    """Gradients of two clients that use other layers: of both at once, and of each alone."""
    trainer = Trainer(Branching(), SGD(lr=0.1), make_data([4, 4]), randomness=Randomness(1))
    theta = trainer.packing.pack(trainer.initial()[None]).repeat(2, 1)
    x = torch.rand(2, 4, 6) * torch.tensor([1.0, -1.0]).view(2, 1, 1)
    inputs = theta, x, torch.zeros(2, 4, dtype=torch.int64), torch.full((2, 4), 1 / 4)
    alone = [trainer.path.gradient(*(t[k : k + 1] for t in inputs))[0] for k in range(2)]
    return trainer.path.gradient(*inputs)[0], alone


def test_a_client_gets_no_gradient_of_a_layer_that_only_another_client_uses() -> None:
    """Taken together, as on a GPU; on a CPU clients go one by one."""
    together, alone = branching()
    assert torch.equal(together.dense(), torch.cat([gradient.dense() for gradient in alone]))


def test_the_distance_of_gradients_of_other_layers_counts_both() -> None:
    _, (one, other) = branching()
    expected = DenseGradient(one.dense()).distance(DenseGradient(other.dense()))
    torch.testing.assert_close(one.distance(other), expected)
    torch.testing.assert_close(other.distance(one), expected)


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(11, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x).mean(1))


@pytest.mark.parametrize("algorithm", [SGD(lr=0.1, momentum=0.9), AdadpLR(lr=0.1)])
def test_a_table_with_sparse_gradients_trains_as_one_with_dense_gradients(algorithm) -> None:
    rows = []
    for sparse in (False, True):
        torch.manual_seed(0)
        data = ClientData(torch.arange(60).view(12, 5) % 11, torch.arange(12) % 3, [np.arange(12)])
        trainer = Trainer(
            Words(sparse), algorithm, data, batch_size=4, epochs=2, randomness=Randomness(1)
        )
        (block,) = trainer.train(trainer.initial(), np.arange(1), 1)
        rows.append(block.rows)
    torch.testing.assert_close(rows[1], rows[0], rtol=0, atol=1e-6)


def test_warnings_quote_the_first_words_of_an_error_of_torch(caplog) -> None:
    """For the sparse gradients of a batch it is a page long."""
    data = ClientData(torch.arange(60).view(12, 5) % 11, torch.arange(12) % 3, [np.arange(12)])
    privacy = ExamplePrivacy(Clipping(1.0), 1.0)
    Trainer(Words(True), SGD(), data, privacy=privacy, randomness=Randomness(1))
    (warning,) = caplog.messages
    assert warning.startswith("examples go through this model one by one, which is slow (vmapped:")
    assert len(warning) < 300


class Hidden(nn.Module):
    """Two layers, of which the first is computed again in the backward pass, or not."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        def hidden(x: Tensor) -> Tensor:
            return self.first(x).tanh()

        computed = checkpoint(hidden, x, use_reentrant=False) if self.again else hidden(x)
        return self.last(computed)


def test_what_is_computed_again_in_the_backward_pass_is_at_the_same_point() -> None:
    """Not at the model's own parameters, which stand in its modules when the forward has ended."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 4, dtype=torch.float64, generator=generator)
    data = ClientData(x, torch.arange(EXAMPLES) % 3, [np.arange(EXAMPLES)])
    found: list[Tensor] = []
    for again in (True, False):
        trainer = Trainer(Hidden(again), SGD(lr=0.1), data, path="plain", randomness=Randomness(1))
        moved = trainer.initial() + torch.arange(1.0, trainer.layout.d + 1) / trainer.layout.d
        theta, trained = trainer.packing.pack(moved[None]), trainer.trained
        gradient, _ = trainer.path.gradient(
            theta, x[None], data.y[None], torch.ones(1, EXAMPLES, dtype=torch.float64)
        )
        state = OwnState(trained.model, trained.loss, trainer.packing.slices)
        one_by_one = SingleExampleMethod(trained.model, trainer.packing, trained.loss, state, False)
        rows, _ = one_by_one.of_client(theta[0], x, data.y)
        found += [trainer.packing.unpack(gradient.dense())[0], rows.tensor[0].sum(0)]
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], rtol=0, atol=1e-12)


class Digits(nn.Module):
    """As in most tutorials: convolutions, then a view, and with ``twice`` one that is no chain."""

    def __init__(self, flatten: Callable[[Tensor], Tensor], twice: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.hidden, self.last = nn.Linear(24, 8), nn.Linear(8, 3)
        self.flatten, self.twice = flatten, twice

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        h = F.relu(self.second(x))
        h = F.max_pool2d(h + F.relu(h) if self.twice else h, 2)
        return self.last(F.relu(self.hidden(self.flatten(h))))


VIEWS = {
    "view": lambda x: x.view(-1, 24),
    "of one size": lambda x: x.view(x.size(0), -1),
    "as another": lambda x: x.view_as(x.flatten(1)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("privacy", [None, ExamplePrivacy(Clipping(1.0), 1.0)])
def test_a_model_may_view_what_convolutions_give(view, twice, frozen, privacy) -> None:
    data = ClientData(torch.rand(12, 1, 8, 8), torch.arange(12) % 3, [np.arange(12)])
    rows, outputs = [], []
    for flatten in (view, lambda x: x.flatten(1)):
        model = Digits(flatten, twice)
        for layer in (model.first, model.second):
            layer.requires_grad_(not frozen)
        trainer = Trainer(
            model, SGD(lr=0.1), data, batch_size=4, privacy=privacy, randomness=Randomness(1)
        )
        (block,) = trainer.train(trainer.initial(), np.arange(1), 1)
        rows.append(block.rows)
        plain = PlainPath(trainer.model, trainer.packing, trainer.trained.loss)
        outputs.append(plain.outputs(trainer.packing.pack(trainer.initial()[None]), data.x[None]))
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)

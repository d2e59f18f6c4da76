"""What a model or a loss keeps reaches no other client's update and no other example's gradient."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim.clients import SGD
from fedsim.datasets import Dataset
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.tasks import CrossEntropy
from fedsim.tasks.losses import Loss
from fedsim.training import ClientData, ExamplePrivacy, Trainer
from fedsim.training.own_state import OwnState

CLIENTS, EXAMPLES, LARGE, LARGE_LOSS = 6, 5, 1e4, 100.0
"""Nothing below LARGE is remembered: a model is tried on smaller inputs, and sees none."""


class Buffer(nn.Module):
    """Divides by the largest input that it has seen, which a buffer keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inside = nn.Linear(4, 2), nn.Identity()
        self.remember(LARGE)

    def remember(self, value: float) -> None:
        self.register_buffer("largest", torch.tensor(value))

    def remembered(self) -> float:
        return float(self.largest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and float(x.detach().abs().max()) > self.remembered():
            self.remember(float(x.detach().abs().max()))
        return self.linear(x * (LARGE / self.remembered()))


class Attribute(Buffer):
    def remember(self, value: float) -> None:
        self.largest = value

    def remembered(self) -> float:
        return self.largest


class OfAChild(Buffer):
    """torch's own module has the attribute."""

    def remember(self, value: float) -> None:
        self.inside.largest = [value]

    def remembered(self) -> float:
        return self.inside.largest[0]


class FixedParameter(Buffer):
    def remember(self, value: float) -> None:
        if not hasattr(self, "largest"):
            self.largest = nn.Parameter(torch.tensor(value), requires_grad=False)
        self.largest.data.fill_(value)

    def remembered(self) -> float:
        return float(self.largest)


class OtherData(FixedParameter):
    """The parameter stays, and has another tensor."""

    def remember(self, value: float) -> None:
        if not hasattr(self, "largest"):
            super().remember(value)
        self.largest.data = torch.tensor(value)


class AnotherParameter(FixedParameter):
    def remember(self, value: float) -> None:
        self.largest = nn.Parameter(torch.tensor(value), requires_grad=False)


class TrainedParameter(Buffer):
    """Writes to what is trained, and not by a step."""

    def remember(self, value: float) -> None:
        self.linear.bias.data.fill_(value)

    def remembered(self) -> float:
        return float(self.linear.bias[0])


class Remembering(CrossEntropy):
    """A loss in units of the largest that it has given."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = super().__call__(outputs, targets)
        vars(self)["largest"] = max(
            vars(self).get("largest", LARGE_LOSS), float(losses.detach().max())
        )
        return losses * (LARGE_LOSS / vars(self)["largest"])


class Slotted:
    """As `Remembering`, without a `__dict__`."""

    __slots__ = ("largest",)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = CrossEntropy()(outputs, targets)
        self.largest = max(getattr(self, "largest", LARGE_LOSS), float(losses.detach().max()))
        return losses * (LARGE_LOSS / self.largest)


def remembering(
    outputs: torch.Tensor, targets: torch.Tensor, *, largest: list[float]
) -> torch.Tensor:
    losses = CrossEntropy()(outputs, targets)
    largest.append(max(*largest, LARGE_LOSS, float(losses.detach().max())))
    return losses * (LARGE_LOSS / largest[-1])


LOSSES = [Remembering, Slotted, lambda: partial(remembering, largest=[LARGE_LOSS])]

MODELS = [Buffer, Attribute, OfAChild, FixedParameter, OtherData, AnotherParameter]


def trainer(model: type[nn.Module], *, outlier: bool, **settings: object) -> Trainer:
    """Clients with five examples each, the first of which may have a large one."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(CLIENTS * EXAMPLES, 4, generator=generator)
    x[2] *= 1e6 if outlier else 1.0
    y = torch.arange(len(x)) % 2
    torch.manual_seed(0)
    data = ClientData(x, y, np.split(np.arange(len(x)), CLIENTS))
    settings = {"batch_size": 2, "epochs": 2, "randomness": Randomness(1), **settings}
    return Trainer(model(), SGD(lr=0.5), data, **settings)


def rows(trained: Trainer, rounds: int = 2) -> torch.Tensor:
    ids = np.arange(CLIENTS)
    blocks = [b for t in range(1, rounds + 1) for b in trained.train(trained.initial(), ids, t)]
    return torch.cat([block.rows for block in blocks])


@pytest.mark.parametrize("model", MODELS)
def test_no_client_leaves_anything_in_the_model_for_another(model: type[nn.Module]) -> None:
    with_it, without = (rows(trainer(model, outlier=outlier)) for outlier in (True, False))
    others = [k for k in range(2 * CLIENTS) if k % CLIENTS]
    assert not torch.equal(with_it[0], without[0])
    assert torch.equal(with_it[others], without[others])


@pytest.mark.parametrize("loss", LOSSES)
def test_no_client_leaves_anything_in_the_loss_for_another(loss: Callable[[], Loss]) -> None:
    with_it, without = (
        rows(trainer(Attribute, outlier=outlier, loss=loss())) for outlier in (True, False)
    )
    others = [k for k in range(2 * CLIENTS) if k % CLIENTS]
    assert torch.equal(with_it[others], without[others])


def test_an_evaluation_leaves_nothing_in_the_model_or_in_the_loss() -> None:
    trained, untouched = (
        trainer(Attribute, outlier=True, loss=Remembering(), metrics={}) for _ in range(2)
    )
    trained.model.train()
    list(trained.evaluate(trained.initial(), np.arange(CLIENTS), 1))
    assert torch.equal(rows(trained), rows(untouched))


@pytest.mark.parametrize("model", [*MODELS, TrainedParameter])
def test_no_example_leaves_anything_for_another_with_example_level_privacy(
    model: type[nn.Module],
) -> None:
    def sums(outlier: bool) -> torch.Tensor:
        privacy = ExamplePrivacy(Clipping(1.0), noise_multiplier=1e-9)
        return rows(trainer(model, outlier=outlier, privacy=privacy, batch_size=0, epochs=1), 1)

    moved = (sums(True) - sums(False)) * EXAMPLES / 0.5  # of sums of clipped gradients
    assert float(moved[0].norm()) <= 2 + 1e-3
    assert torch.equal(moved[1:], torch.zeros_like(moved[1:]))


def test_a_model_that_writes_to_trained_parameters_is_refused_where_it_is_seen_to() -> None:
    class Clamped(Buffer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear.weight.data.clamp_(-0.01, 0.01)
            return super().forward(x)

    privacy = ExamplePrivacy(Clipping(1.0), noise_multiplier=1.0)
    with pytest.raises(FedsimError, match="writes to trained parameters while"):
        trainer(Clamped, outlier=False, privacy=privacy)


@pytest.mark.parametrize(
    "parts",
    [[[0, 1, 1], [2, 3]], [[0, 1], [1, 2]]],
    ids=["twice a client's", "two clients'"],
)
def test_an_example_that_is_counted_once_is_one_clients_and_once(parts: list[list[int]]) -> None:
    data = ClientData(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]), [np.array(p) for p in parts])
    privacy = ExamplePrivacy(Clipping(1.0), noise_multiplier=1.0)
    settings = {"randomness": Randomness(1), "batch_size": 2, "epochs": 1}
    with pytest.raises(FedsimError, match="must belong to one client, once"):
        Trainer(nn.Linear(3, 2), SGD(lr=0.1), data, privacy=privacy, **settings)
    Trainer(nn.Linear(3, 2), SGD(lr=0.1), data, **settings)


PRIVATE = fedsim.RunConfig.from_overrides(
    ["rounds=1", "partition.clients=8", "client.batch-size=4",
     "cohort.name=full", "mechanism.name=clipping", "noise.multiplier=10.0"]
)  # fmt: skip


class Renormed(nn.Module):
    """torch's table that rewrites the rows that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(50, 4, max_norm=0.5), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(x).mean(1))


def test_a_private_run_begins_from_the_model_that_was_given_whatever_the_examples() -> None:
    tokens = np.random.default_rng(1).integers(2, 50, (40, 6))
    model = Renormed()
    given = {name: value.clone() for name, value in model.state_dict().items()}
    train, test = ({"x": part, "y": part[:, 0] % 2} for part in (tokens[:32], tokens[32:]))
    data = Dataset.from_arrays("tokens", train, test, classes=2, vocabulary=50)
    starts: list[torch.Tensor] = []

    class First(fedsim.Callback):
        def on_round(self, status: fedsim.RunStatus) -> None:
            if status.round == 0:
                starts.append(torch.from_numpy(status.arrays["table.weight"].numpy().copy()))

    fedsim.run(PRIVATE, data=data, model=model, callbacks=[First()])
    assert torch.equal(starts[0], given["table.weight"])


class Finite(nn.Module):
    """Raises where another model would give NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("inputs must be finite")
        return self.linear(x)


def test_a_private_run_begins_whatever_the_first_example_is() -> None:
    x = np.random.default_rng(1).random((40, 4), dtype=np.float32)
    x[:32] = np.nan
    train, test = ({"x": part, "y": np.arange(len(part)) % 2} for part in (x[:32], x[32:]))
    data = Dataset.from_arrays("numbers", train, test, classes=2, protected=True)
    result = fedsim.run(PRIVATE, data=data, model=Finite())
    assert result.metrics[-1]["failed"] == 8
    with pytest.raises((FedsimError, ValueError), match="inputs must be finite"):
        fedsim.run(
            PRIVATE.replace(**{"mechanism.name": "none", "noise.multiplier": ""}),
            data=data,
            model=Finite(),
        )


def test_slots_and_the_keywords_of_a_partial_are_put_back() -> None:
    slotted, bound = Slotted(), partial(remembering, largest=[LARGE_LOSS])
    for loss in (slotted, bound):
        with OwnState(Buffer(), loss).restored():
            loss(torch.rand(2, 2), torch.tensor([0, 1]))
    assert not hasattr(slotted, "largest")
    assert bound.keywords["largest"] == [LARGE_LOSS]


@pytest.mark.parametrize(
    "kept",
    [deque([1.0]), np.zeros(2), bytearray(2), [float("nan")], {"largest": torch.zeros(2)}],
    ids=lambda kept: type(kept).__name__,
)
def test_what_is_written_into_any_container_is_seen(kept: Any) -> None:
    class KeepsState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(2, 2), copy.deepcopy(kept)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept["largest" if isinstance(self.kept, dict) else 0] = 7
            return self.layer(x)

    model = KeepsState()
    state = OwnState(model, CrossEntropy())
    with state.restored():
        assert state.changed == []
        model(torch.zeros(1, 2))
        assert state.changed == ["the model's kept"]
    assert state.changed == []


def test_a_tensor_that_a_forward_converts_is_seen() -> None:
    class Converting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(2, 2), torch.ones(2, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale = self.scale.to(x)
            return self.layer(x * self.scale)

    model = Converting()
    state = OwnState(model, CrossEntropy())
    with state.restored():
        model(torch.zeros(1, 2))
        assert state.changed == ["the model's scale"]
    assert model.scale.dtype == torch.float64


def test_what_a_model_and_a_loss_share_stays_shared() -> None:
    model, loss = Buffer(), Remembering()
    model.inside.cache = vars(loss)["cache"] = {}
    state = OwnState(model, loss)
    for _ in range(2):
        with state.restored():
            model.inside.cache["client"] = 1
            assert vars(loss)["cache"] == {"client": 1}
        assert vars(loss)["cache"] == {}


def test_an_attribute_whose_part_cannot_be_copied_is_left_as_it_is() -> None:
    class WithLock:
        def __init__(self) -> None:
            self.values, self.lock = [1], threading.Lock()

    model = Buffer()
    model.part = WithLock()
    model.parts = [model.part]
    with OwnState(model, CrossEntropy(), strict=False).restored():
        pass
    assert model.parts == [model.part]

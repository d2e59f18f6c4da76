"""The plain path holds a client's row in a model of its own: nothing of it shows outside."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_data
from torch import nn
from torch.func import functional_call

from fedsim.clients import SGD, AdadpLR, Adam, LocalAlgorithm
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.training import ExamplePrivacy, Trainer
from fedsim.training.gradients import ParameterGradients
from fedsim.training.paths.path_choice import PathName
from fedsim.training.paths.plain import PlainPath


class Tied(nn.Module):
    """Attention of a kind, with one matrix used twice and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.second(torch.tanh(self.first(x))))))


@pytest.mark.parametrize(
    "algorithm",
    [SGD(lr=0.3), SGD(lr=0.3, momentum=0.9), Adam(lr=0.01), AdadpLR(lr=0.2, tol=0.5)],
    ids=repr,
)
def test_holding_a_row_trains_as_a_functional_call_does(
    algorithm: LocalAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data([9, 0, 4, 7], features=6, dtype=torch.float64)
    model = Tied().double()
    before = copy.deepcopy(model.state_dict())

    def called(
        path: PlainPath, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
    ) -> tuple[ParameterGradients, torch.Tensor]:
        named = {k: v.detach().clone() for k, v in path.packing.named(theta[0]).items()}
        leaves = {name: value.requires_grad_() for name, value in named.items()}
        with torch.enable_grad():
            losses = path.loss(functional_call(path.model, leaves, (x[0],)), y[0])
            gradients = torch.autograd.grad((losses * weight[0]).sum(), list(leaves.values()))
        parts = {name: g[None] for name, g in zip(leaves, gradients, strict=True)}
        return ParameterGradients(parts, path.packing), losses.detach()[None]

    rows = []
    for replaced in (False, True):
        if replaced:
            monkeypatch.setattr(PlainPath, "gradient", called)
        trainer = Trainer(
            model, algorithm, data, batch_size=4, epochs=2, path="plain", randomness=Randomness(3)
        )
        rows.append(joined(trainer.train(trainer.initial(), np.arange(4), 1))[0])
    torch.testing.assert_close(*rows, rtol=0, atol=1e-12)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Twice(nn.Module):
    """A block that stands in the model under one name, and is gone through twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.again(self.first(x))))


@pytest.mark.parametrize("path", ["plain", "func"])
@pytest.mark.parametrize("private", [False, True])
def test_a_module_that_stands_in_a_model_under_two_names_is_trained_as_one_that_is_used_twice(
    path: PathName, private: bool
) -> None:
    model = Twice()
    under_two_names = nn.Sequential(model.first, model.again, model.again, model.head)
    data, rows = make_data([9, 0, 4, 7], features=6, dtype=torch.float32), []
    protection = ExamplePrivacy(Clipping(1.0), noise_multiplier=0.5, delta=1e-5)
    for trained in (model, under_two_names):
        parameters = list(trained.parameters())
        trainer = Trainer(
            trained, SGD(lr=0.3), data, batch_size=4, epochs=2, path=path,
            randomness=Randomness(3, "release"), privacy=protection if private else None,
        )  # fmt: skip
        initial = trainer.initial()
        list(trainer.evaluate(initial, np.arange(4), 1))
        rows.append(joined(trainer.train(initial, np.arange(4), 1))[0])
        assert all(a is b for a, b in zip(parameters, trained.parameters(), strict=True))
        assert torch.equal(trainer.initial(), initial)
    assert torch.equal(*rows)

"""Buffers that change as a model runs are carried in runs without privacy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import make_data
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import fedsim
from fedsim import RunConfig
from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.models.carried_buffers import CarriedBuffers
from fedsim.randomness import Randomness
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.runs.resolve import resolve
from fedsim.training import ExamplePrivacy, Trainer


class Spectral(nn.Module):
    """Layers with torch's spectral_norm, the new one and the old one, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = spectral_norm(nn.Conv2d(1, 4, 3, stride=2))
        self.norm = nn.InstanceNorm2d(4, track_running_stats=True)
        self.second = nn.utils.spectral_norm(nn.Linear(36, 6))
        self.scale = spectral_norm(nn.Linear(36, 1))  # of one row: exact before training
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x.view(-1, 1, 8, 8))))
        x = x.flatten(1)
        return self.head(torch.tanh(self.second(x))) * self.scale(x).exp()


class Counting(nn.Module):
    """Writes into buffers, or assigns them; what it has counted scales its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Module()
        self.inner.register_buffer("mean", torch.zeros(64))
        self.register_buffer("size", torch.ones(()))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("fixed", torch.ones(64))
        self.register_buffer("last", torch.zeros(()), persistent=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.begun = torch.tensor(True)
            self.inner.mean.lerp_(x.detach().mean(0), 0.1)
            self.size = 0.9 * self.size + 0.1 * x.detach().square().mean().sqrt()
            self.last = x.detach().mean()
        x = (x - self.inner.mean) * self.fixed / self.size
        return self.head(x) / (1 + self.steps) + self.begun * self.last


CONFIG = RunConfig().replace(
    **{
        "rounds": 3,
        "partition.clients": 2,
        "partition.max-examples": 40,
        "client.batch-size": 0,
        "client.epochs": 4,
        "client.lr": 0.2,
        "model.dtype": "float64",
        "checkpoint.every": 1,
        "engine.device": "cpu",
    }
)
KEPT = {"last"}  # not saved with the model


def averaged(models: list[nn.Module], sizes: list[int], before: nn.Module) -> nn.Module:
    """FedAvg of parameters and buffers; those that cannot be averaged are as before."""
    result = copy.deepcopy(before)
    named = {**dict(result.named_parameters()), **dict(result.named_buffers())}
    for name, tensor in named.items():
        if tensor.is_floating_point() and name not in KEPT:
            parts = [
                m.get_parameter(name) if name in dict(m.named_parameters()) else m.get_buffer(name)
                for m in models
            ]
            mean = sum(n * part.detach() for n, part in zip(sizes, parts, strict=True))
            tensor.data = mean / sum(sizes)
    return result


CHANGED = {
    Spectral: ["second.weight_u", "scale.parametrizations.weight.0._v", "norm.running_var"],
    Counting: ["inner.mean", "size"],
}


@pytest.mark.parametrize("kind", [Spectral, Counting])
def test_a_run_is_fedavg_of_a_plain_loop_with_torchs_own_buffers(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    config = CONFIG
    data = resolve(config, ObjectOverrides(kind())).trainer.data
    model = kind().double()
    for _ in range(config.rounds):
        trained, sizes = [], []
        for own in data.indices:
            local = copy.deepcopy(model).train()
            optimizer = torch.optim.SGD(local.parameters(), 0.2)
            for _ in range(4):
                optimizer.zero_grad()
                rows = torch.from_numpy(own)
                x = data.inputs(rows[None], torch.float64)[0]
                F.cross_entropy(local(x), data.y[rows]).backward()
                optimizer.step()
            trained.append(local)
            sizes.append(len(own))
        model = averaged(trained, sizes, model)
    result = fedsim.run(config, model=kind(), out=tmp_path / "run")
    own = kind().double()
    saved = fedsim.load(tmp_path / "run", model=own)
    state = model.state_dict()
    assert {*saved.weights} == {*state}
    for name, value in saved.weights.items():
        assert value.dtype == state[name].dtype
        torch.testing.assert_close(value, state[name], rtol=1e-6, atol=1e-8)
        assert torch.equal(own.state_dict()[name], value)
    # Evaluation, in the run and after it, is by torch's own model with these values.
    x = torch.rand(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(saved.model(x), own.eval()(x))
    assert saved.evaluate()["loss"] == pytest.approx(result.metrics[-1]["test-loss"], rel=1e-9)
    initial = kind().double().state_dict()
    for name in CHANGED[kind]:
        assert (saved.weights[name] - initial[name]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [Spectral, Counting])
def test_a_resumed_run_has_the_same_bytes(kind: type[nn.Module], tmp_path: Path) -> None:
    fedsim.run(CONFIG, model=kind(), out=tmp_path / "whole")
    cut = fedsim.run(CONFIG, model=kind(), out=tmp_path / "cut", callbacks=[Interrupting()])
    assert (cut.ended, cut.rounds) == ("interrupted", 2)
    fedsim.run(CONFIG, model=kind(), out=tmp_path / "cut", resume=True)
    first, second = (tmp_path / name / "model.safetensors" for name in ("whole", "cut"))
    assert first.read_bytes() == second.read_bytes()


class Interrupting(fedsim.Callback):
    def on_round(self, status: Any) -> None:
        if status.round == 2:
            raise KeyboardInterrupt  # after the checkpoint of round 1


def test_what_is_carried_is_said_and_unchanged_buffers_are_left() -> None:
    resolved = resolve(CONFIG, ObjectOverrides(Counting()))
    assert [*dict(resolved.model.named_buffers())] == ["steps", "begun", "fixed", "last"]
    assert resolved.trainer.path.name == "plain"
    sent = [entry.name for entry in resolved.trainer.layout.entries]
    assert sent == ["size", "inner.mean", "head.weight", "head.bias"]
    _, first, second = resolved.notes
    assert first.startswith(
        "The buffers size, inner.mean, which change as the model runs, are sent"
    )
    assert second.startswith("The buffers steps, begun, last, which change")


EXAMPLES = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"mechanism.name": "clipping", "noise.multiplier": 1.0},
            r"changes its buffers size, steps, .* as it runs, which no client's update",
        ),
        (
            {**EXAMPLES, "client.batch-size": 5},
            r"changes its buffers size, steps, .* as it runs, which no client's update",
        ),
        ({"server.optimizer": "fedadam"}, r"server\.optimizer is 'fedadam'; it must be 'sgd' or"),
        ({"server.momentum": 0.5}, r"server\.lr of at most 1 and no momentum"),
        ({"client.name": "fednova"}, r"changes its buffer size as it runs, and .* scales what"),
        (
            {"client.name": "ditto", "client.state": "client"},
            r"changes its buffer size as it runs, and .* takes gradients at others too",
        ),
        ({"client.path": "func"}, r"client\.path = 'func' does not take .* statistics"),
    ],
)
def test_runs_that_cannot_carry_buffers_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedsimError, match=sentence):
        resolve(CONFIG.replace(**changes), ObjectOverrides(Counting()))


def test_a_trainer_with_example_level_privacy_refuses_carried_buffers() -> None:
    model = Counting()
    CarriedBuffers(model, ["size", "steps"])
    privacy = ExamplePrivacy(Clipping(1.0), 1.0)
    with pytest.raises(FedsimError, match=r"changes its buffers size, steps .*client\.mechanism"):
        Trainer(
            model, SGD(0.1), make_data([9], features=64), randomness=Randomness(1), privacy=privacy
        )


class Remembering(Counting):
    """Keeps state in an attribute too."""

    shift: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x) + self.shift
        self.shift = self.shift + x.detach().mean()
        return outputs


def test_state_in_an_attribute_is_refused_beside_carried_buffers() -> None:
    with pytest.raises(FedsimError, match="the model gives other outputs for the same inputs"):
        resolve(CONFIG, ObjectOverrides(Remembering()))


def test_a_call_that_fails_leaves_parameters_as_they_were() -> None:
    model = Spectral()
    CarriedBuffers(model, ["first.parametrizations.weight.0._u", "second.weight_v"])
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError):
        model(torch.zeros(3, 63))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    copied = copy.deepcopy(model)
    copied(torch.ones(3, 64))
    value = "first.parametrizations.weight.0._u"
    assert torch.equal(model.get_parameter(value), dict(Spectral().named_buffers())[value])


def test_gradients_of_a_block_write_each_clients_own_buffers() -> None:
    """As on a GPU, where clients' parameters are replaced and not bound."""
    resolved = resolve(CONFIG, ObjectOverrides(Spectral()))
    trainer, path = resolved.trainer, resolved.trainer.path
    theta = trainer.personal.initial.repeat(2, 1)
    theta[1] *= 1.1
    alone = [theta[k : k + 1].clone() for k in range(2)]
    x = trainer.data.inputs(torch.arange(6).view(2, 3), torch.float64)
    y = trainer.data.y[:6].view(2, 3)
    weight = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    gradient, _ = path.gradient(theta, x, y, weight)
    for k, row in enumerate(alone):
        own, _ = path.gradient_of_one(row, x[k], y[k], weight[k])
        torch.testing.assert_close(theta[k], row[0])
        torch.testing.assert_close(gradient.norms()[k], own.norms()[0])
    start = trainer.personal.initial
    place = trainer.packing.slices["second.weight_u"]
    assert not torch.equal(theta[0, place], start[place])
    assert np.flatnonzero((theta[0] != start).numpy()).size == 4 + 9 + 6 + 36 + 36 + 8

"""Dropout in a whole block: masks at counters, each client's own."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from clients_helpers import make_data
from cuda_helpers import ALGORITHMS, NoReadingBack, Tape, as_if_on_a_gpu, pretend, rounds
from torch import nn
from torch.nn.functional import cross_entropy

from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.kernels.device_normals import uniforms_at
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.training import ExamplePrivacy, Trainer
from fedsim.training.graphs import StepGraphs
from fedsim.training.paths.dropout import DropoutPath
from fedsim.training.paths.path_choice import choose

SIZES = [9, 5, 7, 1, 14, 0, 12]
COHORTS = [[0, 1, 4], range(7), range(4)]
CUDA = torch.device("cuda")


def model_of(p=0.5, *, inside=True):
    torch.manual_seed(0)
    layers = [nn.Linear(36, 12), nn.ReLU(), nn.Dropout(p)]
    layers += [nn.Linear(12, 8), nn.Tanh(), nn.Dropout(0.25)] if inside else [nn.Linear(12, 8)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(8, 3)).double()


def trainer_of(model=None, algorithm=None, path="func", **settings):
    data = make_data(SIZES, dtype=torch.float64, features=36)
    return Trainer(
        model or model_of(), algorithm or SGD(lr=0.1), data, batch_size=4, epochs=3, path=path,
        randomness=Randomness(3, "ab"), **settings,
    )  # fmt: skip


def test_uniform_draws_fill_the_unit_interval_and_are_a_streams_own():
    key = torch.tensor([[1, 2], [3, 4]])
    counter = torch.tensor([[5, 6, 7], [5, 6, 7]])
    drawn = uniforms_at(key, counter, 40_001)
    assert drawn.shape == (2, 40_001)
    assert 0 <= drawn.min() < 1e-3 < 1 - 1e-3 < drawn.max() < 1
    assert abs(float(drawn.mean()) - 0.5) < 5 / (12 * drawn.numel()) ** 0.5
    assert torch.equal(uniforms_at(key[1:], counter[1:], 17), drawn[1:, :17])
    assert len(drawn[0].unique()) == 40_001


def test_a_step_is_that_of_a_loop_with_the_same_masks():
    trainer = trainer_of()
    path, packing = trainer.path, trainer.packing
    assert isinstance(path, DropoutPath)
    key, counter = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6, 7], [8, 9, 10]])
    theta = packing.pack(trainer.initial()[None]).expand(2, -1).clone()
    x, y = torch.randn(2, 4, 36, dtype=torch.float64), torch.randint(3, (2, 4))
    weight = torch.tensor([[0.25] * 4, [0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    gradient, losses = path.gradient(theta, x, y, weight, (key, counter))
    drawn = uniforms_at(key, counter, 4 * (12 + 8))
    for k in range(2):
        named = {
            name: leaf.requires_grad_() for name, leaf in packing.named(theta[k].clone()).items()
        }
        first, second = drawn[k].split([4 * 12, 4 * 8])
        h = torch.relu(nn.functional.linear(x[k], named["1.weight"], named["1.bias"]))
        h = h * (first.view(4, 12) >= 0.5) / 0.5
        h = torch.tanh(nn.functional.linear(h, named["4.weight"], named["4.bias"]))
        h = h * (second.view(4, 8) >= 0.25) / 0.75
        outputs = nn.functional.linear(h, named["7.weight"], named["7.bias"])
        own = cross_entropy(outputs, y[k], reduction="none")
        torch.testing.assert_close(losses[k], own.detach())
        expected = torch.autograd.grad((own * weight[k]).sum(), [*named.values()])
        for leaf, name in zip(expected, named, strict=True):
            place = packing.slices[name]
            torch.testing.assert_close(gradient.values[k, place], leaf.flatten())


@pytest.mark.parametrize("name", ["sgd", "adadp", "scheduled"])
def test_captured_steps_are_the_eager_ones_and_read_nothing_back(monkeypatch, name):
    found = []
    for tape in (None, Tape()):
        trainer = trainer_of(algorithm=ALGORITHMS[name])
        vector = pretend(trainer.initial())
        with monkeypatch.context() as patch:
            trainer = as_if_on_a_gpu(patch, trainer)
            if tape is not None:
                trainer.stepper.captured_step = StepGraphs(trainer.stepper, tape, 4)
            found.append(rounds(trainer, vector, COHORTS))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert trainer.stepper.captured_step.can_capture
    assert trainer.stepper.captured_step.graphs


def test_a_client_has_the_same_bytes_whoever_shares_its_block_and_other_masks_in_each_step():
    used = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Randomness, "address_observer", used.append)
        together = rounds(trainer_of(), trainer_of().initial(), [range(7)])
        masks = [one for one in used if one.purpose.name == "DROPOUT"]
    assert len({*masks}) == len(masks) == sum(3 * -(-size // 4) for size in SIZES)
    alone = rounds(trainer_of(block_size=1), trainer_of().initial(), [range(7)])
    assert torch.equal(together[0], alone[0])
    without = rounds(trainer_of(model_of(1e-12)), trainer_of().initial(), [range(7)])
    assert not torch.allclose(together[0], without[0], atol=1e-3)


def test_evaluation_drops_nothing():
    func, plain = trainer_of(), trainer_of(path="plain")
    vector = func.initial()
    for one, other in zip(
        func.evaluate(vector, np.arange(7), 1), plain.evaluate(vector, np.arange(7), 1), strict=True
    ):
        for name, values in one.metrics.items():
            np.testing.assert_allclose(values, other.metrics[name], atol=1e-12)


def test_all_but_the_dropout_is_the_graphs_own():
    trainer = trainer_of()
    read, path = trainer.trained.reading.structure.module, trainer.path.model
    assert path.get_submodule("4") is read.get_submodule("4")
    assert isinstance(read.get_submodule("3"), nn.Dropout)
    assert not isinstance(path.get_submodule("3"), nn.Dropout)


class Functional(nn.Linear):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x.flatten(1)), 0.5, self.training)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(36, 3)

    def forward(self, x):
        return self.drop(self.layer(self.drop(x)))


def test_the_rule_takes_it_on_a_gpu_alone_and_other_draws_nowhere():
    trained = trainer_of(path="auto").trained
    assert trainer_of(path="auto").path.name == "plain"
    assert isinstance(choose("auto", trained, CUDA), DropoutPath)
    assert choose("plain", trained, CUDA).name == "plain"
    for other in (nn.Sequential(Functional(36, 3)).double(), Twice().double()):
        trained = trainer_of(other, path="auto").trained
        assert choose("auto", trained, CUDA).name == "plain"
        with pytest.raises(FedsimError, match="draws random numbers"):
            trainer_of(other)
    private = trainer_of(path="auto", privacy=ExamplePrivacy(Clipping(1.0), 1.0))
    assert choose("auto", private.trained, CUDA).name == "plain"


def test_no_mask_is_read_back(monkeypatch):
    trainer = trainer_of()
    draws = torch.tensor([[1, 2]]), torch.tensor([[5, 6, 7]])
    theta = pretend(trainer.packing.pack(trainer.initial()[None]))
    x = pretend(torch.randn(1, 4, 36, dtype=torch.float64))
    y, weight = pretend(torch.zeros(1, 4, dtype=torch.int64)), pretend(torch.ones(1, 4).double())
    with NoReadingBack():
        trainer.path.gradient(theta, x, y, weight, draws)


class Partly(nn.Module):
    """Two layers of dropout, of which one may stay in evaluation mode, or write in place."""

    def __init__(self, *, off, inplace=False):
        super().__init__()
        torch.manual_seed(0)
        self.flat, self.first, self.last = nn.Flatten(), nn.Linear(36, 12), nn.Linear(12, 3)
        self.drop, self.other, self.off = nn.Dropout(0.5, inplace), nn.Dropout(0.5), off

    def train(self, mode=True):
        super().train(mode)
        if self.off:
            self.other.eval()
        return self

    def forward(self, x):
        h = self.first(self.flat(x))
        return self.last(self.other(self.drop(h) + h))


@pytest.mark.parametrize(("off", "inplace"), [(True, False), (False, True), (True, True)])
def test_a_layer_that_stays_off_drops_nothing_and_one_in_place_writes_to_its_inputs(off, inplace):
    path = trainer_of(Partly(off=off, inplace=inplace).double()).path
    assert isinstance(path, DropoutPath)
    key, counter = torch.tensor([[1, 2]]), torch.tensor([[5, 6, 7]])
    x, y = torch.randn(1, 4, 36, dtype=torch.float64), torch.randint(3, (1, 4))
    weight = torch.ones(1, 4, dtype=torch.float64)
    model = Partly(off=off, inplace=inplace).double()
    theta = path.packing.pack(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
    _, losses = path.gradient(theta, x, y, weight, (key, counter))
    first, second = uniforms_at(key, counter, 4 * 24)[0].view(2, 4, 12)
    h = model.first(x[0])
    dropped = h * (first >= 0.5) / 0.5
    h = dropped + (dropped if inplace else h)
    h = h if off else h * (second >= 0.5) / 0.5
    expected = cross_entropy(model.last(h), y[0], reduction="none")
    torch.testing.assert_close(losses[0], expected.detach())


def test_examples_gradients_leave_out_dropout_that_a_model_keeps_off():
    torch.manual_seed(1)
    model = Partly(off=True).double()
    model.drop = nn.Identity()
    rows = []
    for twin in (model, Partly(off=False).double()):
        if twin is not model:
            twin.drop = twin.other = nn.Identity()
        trainer = trainer_of(twin, path="auto", privacy=ExamplePrivacy(Clipping(0.3), 0.0))
        assert trainer.rounds.private.method.name == "factored"
        rows.append(next(iter(trainer.train(trainer.initial(), np.array([0, 1]), 1))).rows)
    torch.testing.assert_close(rows[0], rows[1])


def test_a_layer_that_drops_all_does_so_in_training_alone():
    model = model_of()
    model[6].p = 1.0
    of_paths = {path: trainer_of(copy.deepcopy(model), path=path) for path in ("func", "plain")}
    (evaluated,), (expected,) = (
        trainer.evaluate(trainer.initial(), np.array([0, 1]), 1) for trainer in of_paths.values()
    )
    np.testing.assert_allclose(evaluated.metrics["loss"], expected.metrics["loss"])
    (trained,) = of_paths["func"].train(of_paths["func"].initial(), np.array([0, 1]), 1)
    assert torch.isfinite(trained.rows).all()
    # All weights before the last layer's have no gradient, and its bias has one.
    assert not trained.rows[:, :-3].any()
    assert trained.rows[:, -3:].all()


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_trainer_can_be_sent_after_it_was_used(p):
    model = model_of(inside=False)
    if not p:
        model[3] = nn.Identity()
    trainer = trainer_of(model)
    for number in (1, 2):
        (block,) = trainer.train(trainer.initial(), np.array([0]), number)
        sent = pickle.loads(pickle.dumps(trainer))
        (again,) = sent.train(trainer.initial(), np.array([0]), number)
        assert torch.equal(again.rows, block.rows)


def test_masks_come_from_the_operating_system_where_noise_does():
    rows = []
    for _ in range(2):
        trainer = Trainer(
            model_of(), SGD(lr=0.1), make_data([8, 8], dtype=torch.float64, features=36),
            batch_size=8, steps=1, path="func", randomness=Randomness(None),
        )  # fmt: skip
        assert isinstance(trainer.path, DropoutPath)
        (block,) = trainer.train(trainer.initial(), np.arange(2), 1)
        rows.append(block.rows)
    assert rows[0].isfinite().all()
    assert not torch.equal(rows[0], rows[1])  # whole batches: only the masks are drawn

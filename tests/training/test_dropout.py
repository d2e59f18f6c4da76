"""Dropout in a whole block: masks at counters, each client's own."""

from __future__ import annotations

import copy
import itertools
import pickle
from math import prod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import make_data
from cuda_helpers import (
    ALGORITHMS,
    DEVICES,
    NoReadingBack,
    Tape,
    as_if_on_a_gpu,
    assert_captured,
    on_device,
    pretend,
    rounds,
)
from torch import nn
from torch.nn.functional import cross_entropy

from fedsim.clients import SGD, AdadpLR, Step
from fedsim.errors import FedsimError
from fedsim.kernels.device_normals import uniforms_at
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.training import ExamplePrivacy, Trainer
from fedsim.training.graphs import StepGraphs
from fedsim.training.paths.dropout import DropoutPath
from fedsim.training.paths.masks import with_masks
from fedsim.training.paths.path_choice import choose
from fedsim.training.probe import gradient_methods
from fedsim.training.steps import DROPOUT_COUNTER, DROPOUT_KEY

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


@pytest.mark.parametrize("device", DEVICES)
def test_uniform_draws_are_numpys_fill_the_unit_interval_and_are_a_streams_own(device):
    key = torch.tensor([[1, 2], [3, 4]], device=device)
    counter = torch.tensor([[5, 6, 7], [5, 6, 7]], device=device)
    for own, drawn in zip(key.tolist(), uniforms_at(key, counter, 1001).cpu(), strict=True):
        # numpy's generator begins with the second block of a stream.
        philox = np.random.Philox(key=own, counter=[0, 5, 6, 7])
        np.testing.assert_array_equal(drawn[4:], np.random.Generator(philox).random(997))
    assert torch.equal(uniforms_at(key, counter, 8, 3), uniforms_at(key, counter, 32)[:, 24:])
    drawn = uniforms_at(key, counter, 40_001)
    assert drawn.shape == (2, 40_001)
    assert 0 <= drawn.min() < 1e-3 < 1 - 1e-3 < drawn.max() < 1
    assert abs(float(drawn.mean()) - 0.5) < 5 / (12 * drawn.numel()) ** 0.5
    assert torch.equal(uniforms_at(key[1:], counter[1:], 17), drawn[1:, :17])
    assert len(drawn[0].unique()) == 40_001


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(36, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(torch.tanh(F.dropout(self.first(x), 0.5, self.training)))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.first, self.last = nn.Dropout(0.5), nn.Linear(36, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(self.drop(self.first(self.drop(x.flatten(1)))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.GRU(6, 5, num_layers=2, dropout=0.4, batch_first=True)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.layers(x.unflatten(1, (6, 6)))[0][:, -1])


class LayerByLayer(Recurrent):
    """The same by one call of torch's for each layer, with dropout written out."""

    def forward(self, x):
        h = x.unflatten(1, (6, 6))
        for k in range(2):
            names = (f"{kind}_l{k}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            own = [getattr(self.layers, name) for name in names]
            start = h.new_zeros(1, len(h), 5)
            h, _ = torch.gru(h, start, own, True, 1, 0.0, False, False, True)
            h = F.dropout(h, 0.4) if k == 0 else h
        return self.last(h[:, -1])


DROPPING = {
    "layers": model_of,
    "function": Functional,
    "twice": Twice,
    "channels": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.5),
        nn.Flatten(), nn.Linear(64, 3),
    ),
    "between recurrent layers": Recurrent,
}  # fmt: skip
MASKS = {
    "layers": [(0.5, 12), (0.25, 8)],
    "function": [(0.5, 12)],
    "twice": [(0.5, 36), (0.5, 12)],
    "channels": [(0.5, 4, 1, 1)],
    "between recurrent layers": [(0.4, 6, 5)],
}
"""Probability and shape of each mask of an example, in the order of their calls."""


def seeded_model(name):
    torch.manual_seed(2)
    return DROPPING[name]().double()


def masks_of(name, key, counter, batch, piece=0):
    """Masks ``[n, B, ...]`` of a model's calls."""
    sizes = [batch * prod(shape) for _, *shape in MASKS[name]]
    drawn = uniforms_at(key, counter, sum(sizes), piece).split(sizes, dim=1)
    return [
        (uniform.view(len(key), batch, *shape) >= p).double() / (1 - p)
        for uniform, (p, *shape) in zip(drawn, MASKS[name], strict=True)
    ]


def plain_gradient(monkeypatch, name, named, x, y, weight, masks):
    """Gradient ``[d]`` and losses ``[B]`` of the user's model, which drops by these masks."""
    left = iter(masks)
    model = LayerByLayer().double() if name == "between recurrent layers" else seeded_model(name)
    leaves = {k: v.detach().clone().requires_grad_() for k, v in named.items()}
    with monkeypatch.context() as patch, torch.enable_grad():
        for function in ("dropout", "dropout2d"):
            patch.setattr(F, function, lambda h, *_, **__: h * next(left))
        outputs = torch.func.functional_call(model.to(x.device).train(), leaves, (x,))
        losses = F.cross_entropy(outputs, y, reduction="none")
        gradients = torch.autograd.grad((losses * weight).sum(), [*leaves.values()])
    assert next(left, None) is None
    return torch.cat([gradient.flatten() for gradient in gradients]), losses.detach()


def two_clients(trainer):
    """Parameters, keys, counters and batches of two clients, of four examples each."""
    generator, device = torch.Generator().manual_seed(4), trainer.device
    theta = trainer.packing.pack(trainer.initial()[None]).expand(2, -1).clone()
    theta[1] *= 1.1
    x = torch.randn(2, 4, 36, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (2, 4), generator=generator)
    key, counter = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6, 7], [8, 9, 10]])
    return theta, *(tensor.to(device) for tensor in (key, counter, x, y))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DROPPING)
def test_a_step_is_that_of_a_loop_with_the_same_masks(monkeypatch, name, device):
    trainer = trainer_of(seeded_model(name), device=device)
    path, packing = trainer.path, trainer.packing
    assert isinstance(path, DropoutPath)
    theta, key, counter, x, y = two_clients(trainer)
    weight = torch.tensor([[0.25] * 4, [0.5, 0.5, 0.0, 0.0]], dtype=torch.float64).to(x.device)
    masked = with_masks(path.model, x, key, counter, torch.float64)
    gradient, losses = path.gradient(theta, masked, y, weight)
    masks = masks_of(name, key, counter, 4)
    for k in range(2):
        own = packing.named(theta[k]), x[k], y[k], weight[k], [mask[k] for mask in masks]
        expected, own_losses = plain_gradient(monkeypatch, name, *own)
        torch.testing.assert_close(losses[k], own_losses)
        torch.testing.assert_close(packing.unpack(gradient.values[k : k + 1])[0], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DROPPING)
def test_rows_of_examples_are_those_of_a_loop_with_the_same_masks(monkeypatch, name, device):
    private = ExamplePrivacy(Clipping(1.0), 1.0)
    trainer = trainer_of(seeded_model(name), device=device, privacy=private)
    methods = gradient_methods(trainer.trained, trainer.path)
    chosen = trainer.rounds.private.method
    factored = ["factored"] * (name != "between recurrent layers")
    assert [method.name for method in methods] == [*factored, "vmapped", "one by one"]
    assert (chosen.name, chosen.takes_blocks) == (methods[0].name, True)
    theta, key, counter, x, y = two_clients(trainer)
    masks, one = masks_of(name, key, counter, 4, piece=3), x.new_ones(1)
    masked = with_masks(trainer.path.model, x, key, counter, torch.float64, 3)
    for method in methods:
        found = [method.of_client(theta[k], masked[k], y[k]) for k in range(2)]
        rows = torch.cat([rows.dense() for rows, _ in found])
        losses = torch.stack([losses for _, losses in found])
        if method.takes_blocks:
            block, block_losses = method.block_rows(theta, masked, y)
            torch.testing.assert_close(block.dense(), rows, rtol=0, atol=1e-12)
            torch.testing.assert_close(block_losses, losses, rtol=0, atol=1e-12)
        for k, j in itertools.product(range(2), range(4)):
            example, own = slice(j, j + 1), [mask[k, j : j + 1] for mask in masks]
            given = trainer.packing.named(theta[k]), x[k, example], y[k, example], one, own
            expected, loss = plain_gradient(monkeypatch, name, *given)
            torch.testing.assert_close(rows[k, j], expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(losses[k, example], loss, rtol=0, atol=1e-12)


@pytest.mark.spanning
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("algorithm", ["sgd", "adadp"])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("name", DROPPING)
def test_a_block_on_a_gpu_drops_what_a_cpu_does(
    monkeypatch, name, private, algorithm, captured, device
):
    own = {"privacy": ExamplePrivacy(Clipping(0.5), 0.7, chunk=4)} if private else {}
    own |= {"algorithm": AdadpLR(lr=0.1, discard=False) if private else ALGORITHMS[algorithm]}

    def make(device):
        return trainer_of(seeded_model(name), device=device, **own)

    with monkeypatch.context() as patch:
        patch.setattr("fedsim.training.local_rounds.draws_on_device", lambda *_: True)
        patch.setattr("fedsim.training.trainer.draws_on_device", lambda *_: True)
        cpu = make("cpu")
        expected = rounds(cpu, cpu.initial(), COHORTS)
    trainer, vector = on_device(monkeypatch, device, make, captured=captured)
    assert not trainer.rounds.draws_one_by_one
    found = rounds(trainer, vector, COHORTS)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if private else 1e-10)
    if captured:
        assert_captured(trainer)


def test_masks_of_protected_examples_are_a_clients_own_and_other_ones_in_each_step_and_chunk():
    used, found, chunks = [], [], set()

    def noted(*given):
        chunks.add(given[-1])
        return with_masks(*given)

    for block_size in (1, 7):
        trainer = trainer_of(
            privacy=ExamplePrivacy(Clipping(0.5), 0.7, chunk=4), block_size=block_size
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Randomness, "address_observer", used.append)
            patch.setattr("fedsim.training.steps.with_masks", noted)
            found += rounds(trainer, trainer.initial(), [range(7)])
    assert torch.equal(*found)
    assert chunks == {0, 1}
    addresses = [one for one in used if one.purpose.name == "DROPOUT"]
    steps = trainer.workload.steps(np.arange(7))
    assert len(addresses) == 2 * steps.sum()
    assert len({*addresses}) == steps.sum()
    _, key, counter, _, _ = two_clients(trainer)
    state = {DROPOUT_KEY: key, DROPOUT_COUNTER: counter}
    drawn = [
        trainer.stepper.inputs(state, torch.arange(8).view(2, 4), Step(1, step), chunk).tensors
        for step, chunk in itertools.product(range(3), repeat=2)
    ]
    for one, other in itertools.combinations(drawn, 2):
        assert not any(torch.equal(one[k], other[k]) for k in one if k.startswith("mask"))


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
    of_read, of_path = (
        {node.target for node in graph.graph.nodes if node.op == "call_module"}
        for graph in (read, path)
    )
    assert of_read - of_path == {"3", "6"}


@pytest.mark.parametrize("privacy", [None, ExamplePrivacy(Clipping(1.0), 1.0)])
def test_the_rule_takes_it_on_a_gpu_alone_and_other_draws_nowhere(privacy):
    trained = trainer_of(path="auto", privacy=privacy).trained
    assert trainer_of(path="auto", privacy=privacy).path.name == "plain"
    assert isinstance(choose("auto", trained, CUDA), DropoutPath)
    assert choose("plain", trained, CUDA).name == "plain"
    for other in (
        nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Dropout(0.5), nn.AlphaDropout(0.5)),
        nn.Sequential(DropsWeights(36, 3), nn.Dropout(0.5)),
    ):
        trained = trainer_of(other.double(), path="auto", privacy=privacy).trained
        assert choose("auto", trained, CUDA).name == "plain"
        with pytest.raises(FedsimError, match="draws random numbers"):
            trainer_of(other.double(), privacy=privacy)


class DropsWeights(nn.Linear):
    """One mask for all examples: not an input of each."""

    def forward(self, x):
        weight = nn.functional.dropout(self.weight, 0.5, self.training)
        return nn.functional.linear(x.flatten(1), weight, self.bias)


def test_no_mask_is_read_back(monkeypatch):
    trainer = trainer_of()
    draws = torch.tensor([[1, 2]]), torch.tensor([[5, 6, 7]])
    theta = pretend(trainer.packing.pack(trainer.initial()[None]))
    x = pretend(torch.randn(1, 4, 36, dtype=torch.float64))
    y, weight = pretend(torch.zeros(1, 4, dtype=torch.int64)), pretend(torch.ones(1, 4).double())
    with NoReadingBack():
        masked = with_masks(trainer.path.model, x, *draws, torch.float64)
        trainer.path.gradient(theta, masked, y, weight)


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
    masked = with_masks(path.model, x, key, counter, torch.float64)
    _, losses = path.gradient(theta, masked, y, weight)
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

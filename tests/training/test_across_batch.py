"""What looks across a batch gets its real batches, at every width; padding copies an example."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import joined, make_cnn, make_data, make_mlp
from cuda_helpers import Tape
from torch import nn
from torch.func import functional_call

from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.tasks.losses import CrossEntropy
from fedsim.training import ClientData, ExamplePrivacy, Trainer, evaluation
from fedsim.training.batches import plan_batches, plan_poisson
from fedsim.training.graphs import StepGraphs

SIZES = [11, 1, 5, 7, 2, 0, 16]
"""Odd and unequal, with last batches that are short, one example and none."""

F64 = {"dtype": torch.float64}


class Own(nn.Module):
    """A linear model with something done to inputs or outputs."""

    def __init__(self, before=lambda x: x, after=lambda y: y, features=6, outputs=3):
        super().__init__()
        torch.manual_seed(5)
        self.before, self.after = before, after
        self.linear = nn.Linear(features, outputs)

    def forward(self, x):
        return self.after(self.linear(self.before(x)))


class Graphs(nn.Module):
    """A mean over the nodes that a graph has: none in an example of zeros."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.node, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        nodes = x.view(x.shape[0], 2, 3)
        there = (nodes.abs().sum(2) > 0).to(x.dtype)
        seen = torch.tanh(self.node(nodes)) * there.unsqueeze(2)
        return self.head(seen.sum(1) / there.sum(1, keepdim=True))


def nt_xent(outputs, y):
    """SimCLR's: an example's pair is itself, turned, and no other of the batch is."""
    z = F.normalize(outputs, dim=1)
    pairs = torch.cat([z, -z.flip(1)])
    likeness = (pairs @ pairs.T / 0.5).masked_fill(torch.eye(len(pairs), dtype=torch.bool), -1e9)
    positive = likeness.roll(len(z), 1).diagonal()
    return (likeness.logsumexp(1) - positive)[: len(z)]


def cox(outputs, y):
    """Partial likelihood: who is at risk is whoever of the batch comes later."""
    order = y.argsort(descending=True, stable=True)
    risk = outputs[order, 0].logcumsumexp(0)
    return torch.zeros_like(risk).index_put((order,), risk - outputs[order, 0])


def largest(outputs, y):
    losses = CrossEntropy()(outputs, y)
    return losses + losses.max()


def alone(outputs, y):
    """Looks across nothing, and takes one way or another by a value."""
    return CrossEntropy()(outputs, y) * (2 if bool((outputs > 0).any()) else 3 - 1)


def attention(x):
    return (x @ x.T).softmax(1) @ x if x.shape[0] > 5 else x


MIXES = {
    "centring": (lambda: Own(before=lambda x: x - x.mean(0)), None),
    "centring above 5": (lambda: Own(before=lambda x: x - x.mean(0) * (len(x) > 5)), None),
    "any": (lambda: Own(after=lambda y: y * 2 if (y > 1).any() else y), None),
    "largest of the batch": (lambda: Own(after=lambda y: torch.relu(y - y.max())), None),
    "attention": (lambda: Own(before=attention), None),
    "positions": (lambda: Own(after=lambda y: y * torch.arange(1.0, 1 + len(y))[:, None]), None),
    "NT-Xent": (lambda: make_mlp(), nt_xent),
    "Cox": (lambda: make_mlp(), cox),
    "batch maximum": (lambda: make_mlp(), largest),
    "a loss that branches": (lambda: make_mlp(), alone),
    "images": (
        lambda: nn.Sequential(make_cnn(), Own(after=lambda y: y - y.mean(0), features=3)),
        None,
    ),
}


def trainer_of(model, loss=None, *, data, path="auto", batch=4, **settings):
    return Trainer(
        model, SGD(lr=0.3), data, batch_size=batch, loss=loss, path=path,
        randomness=Randomness(3), **settings,
    )  # fmt: skip


def by_hand(trainer, model, loss, client, batch):
    """Where a client ends that takes each of its batches as it is."""
    loss = loss or CrossEntropy()
    theta = {k: v.detach().clone() for k, v in model.named_parameters()}
    batches = plan_batches(
        trainer.workload.work,
        [trainer.data.indices[client]],
        np.array([client]),
        [trainer.randomness],
        1,
    )
    for index, weight in zip(batches.index[0], batches.weight[0], strict=True):
        real = torch.from_numpy(index[weight > 0])
        leaves = {k: v.requires_grad_() for k, v in theta.items()}
        outputs = functional_call(model, leaves, (trainer.data.x[real],))
        mean = loss(outputs, trainer.data.y[real]).mean()
        gradients = torch.autograd.grad(mean, list(leaves.values()))
        theta = {
            k: (v - 0.3 * g).detach() for (k, v), g in zip(leaves.items(), gradients, strict=True)
        }
    return trainer.layout.flatten(theta) - trainer.initial()


def rows_of(trainer):
    clients = np.arange(trainer.population)
    return joined(trainer.train(trainer.initial(), clients, 1))[0]


def data_for(name):
    if name == "images":
        return make_data(SIZES, features=36, shape=(1, 6, 6))
    return make_data(SIZES)


@pytest.mark.parametrize("batch", [4, 6, 0])
@pytest.mark.parametrize("name", MIXES)
def test_what_looks_across_a_batch_trains_on_real_batches(name, batch):
    make, loss = MIXES[name]
    model = make()
    trainer = trainer_of(model, loss, data=data_for(name), batch=batch)
    assert trainer.path.name == "plain"
    rows = rows_of(trainer)
    for client in [0, 2, 3, 6]:
        expected = by_hand(trainer, model, loss, client, batch)
        torch.testing.assert_close(rows[client], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("path", ["layered", "func"])
def test_a_path_of_equal_widths_does_not_take_what_looks_across_a_batch(path):
    with pytest.raises(FedsimError, match=r"look across a batch \(the model's mean goes through"):
        trainer_of(MIXES["centring"][0](), data=make_data(SIZES), path=path)
    with pytest.raises(FedsimError, match=r"look across a batch \(the loss's"):
        trainer_of(make_mlp(), largest, data=make_data(SIZES), path=path)


def declared(across_batch):
    def loss(outputs, y):
        return alone(outputs, y)

    loss.across_batch = across_batch
    return loss


def test_a_loss_may_declare_whether_it_looks_across_a_batch():
    data = make_data(SIZES)
    assert trainer_of(make_mlp(), declared(True), data=data).path.name == "plain"
    trainer = trainer_of(make_mlp(), declared(False), data=data)
    assert trainer.path.name == "layered"
    plain = trainer_of(make_mlp(), declared(False), data=data, path="plain")
    torch.testing.assert_close(rows_of(trainer), rows_of(plain), rtol=0, atol=1e-5)


def test_a_loss_is_not_taken_at_its_word_where_examples_are_private():
    privacy = ExamplePrivacy(Clipping(0.5), 0.0)
    trainer = trainer_of(make_mlp(), declared(False), data=make_data(SIZES), privacy=privacy)
    assert trainer.rounds.private.method.evidence == "one at a time: user code"


BY_EXAMPLE = {
    "dense layered": (make_mlp, {"features": 6}),
    "func": (lambda: nn.Sequential(nn.LayerNorm(6), make_mlp()), {"features": 6}),
    "graphs by func": (Graphs, {"features": 6}),
    "convolved layered": (make_cnn, {"features": 36, "shape": (1, 6, 6)}),
}


@pytest.mark.parametrize("batch", [1, 3, 4, 0])
@pytest.mark.parametrize("name", BY_EXAMPLE)
def test_paths_of_equal_widths_give_the_plain_paths_rows(name, batch):
    make, shape = BY_EXAMPLE[name]
    data, path = make_data(SIZES, **shape), name.split()[-1]
    mine = rows_of(trainer_of(make(), data=data, path=path, batch=batch))
    plain = rows_of(trainer_of(make(), data=data, path="plain", batch=batch))
    assert torch.isfinite(mine).all()
    torch.testing.assert_close(mine, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", BY_EXAMPLE)
def test_an_example_that_is_not_finite_is_in_its_own_batches_only(name):
    """A client's first example, which other batches were padded with."""
    make, shape = BY_EXAMPLE[name]
    data, path = make_data([7, 7], **shape), name.split()[-1]
    data.x[data.indices[0][0]] = torch.nan
    rows = rows_of(trainer_of(make(), data=data, path=path, steps=1, batch=3))
    plain = rows_of(trainer_of(make(), data=data, path="plain", steps=1, batch=3))
    torch.testing.assert_close(rows, plain, rtol=0, atol=1e-5, equal_nan=True)
    finite = [
        torch.isfinite(
            rows_of(trainer_of(make(), data=data, path=path, steps=steps, batch=3))[0]
        ).all()
        for steps in (1, 2, 3)
    ]
    assert not finite[2]  # all of the client's examples by then
    assert bool(torch.isfinite(rows[1]).all())


def test_a_captured_step_pads_with_copies_too(monkeypatch):
    data = make_data([5, 3, 7], **F64)
    graphs = Graphs().double()
    plain = trainer_of(graphs, data=data, path="plain", batch=4)
    trainer = trainer_of(graphs, data=data, path="func", batch=4)
    trainer.stepper.captured_step = StepGraphs(trainer.stepper, Tape(), 4)
    got = joined(trainer.train(trainer.initial(), np.arange(3), 1))[0]
    torch.testing.assert_close(got, rows_of(plain), rtol=0, atol=1e-10)


def test_padding_repeats_the_first_example_of_its_batch():
    trainer = trainer_of(make_mlp(), data=make_data([7, 1, 10]), batch=4)
    work, own = trainer.workload.work, trainer.data.indices
    padded = 0
    for client in range(3):
        one = ([own[client]], np.array([client]), [trainer.randomness], 1)
        groups = plan_batches(work, *one), plan_poisson(work, *one, 8, amplified=False)
        padded += sum(padding(group, own[client]) for group in groups)
    assert padded


def padding(batches, own):
    """How many places are padding, and repeat the first example of their batch."""
    padded = 0
    flat = batches.index.reshape(*batches.index.shape[:2], -1)
    weight = batches.weight.reshape(flat.shape)
    for index, weights in zip(flat[0], weight[0], strict=True):
        copies = index[weights == 0]
        assert (copies == index[0]).all() or not (weights > 0).any()
        assert set(index) <= set(own)
        padded += len(copies)
    return padded


def test_an_evaluation_pads_with_nothing_where_it_would_be_seen():
    """A model sees chunks of a client's own examples, and a loss that looks across sees all."""
    data = make_data([40, 3, 33])
    model = Own(before=lambda x: x - x.mean(0))
    trainer = trainer_of(model, largest, data=data)
    (block,) = trainer.evaluate(trainer.initial(), np.arange(3), 1)
    for client in range(3):
        own = torch.from_numpy(data.indices[client])
        with torch.no_grad():
            outputs = torch.cat([model(data.x[chunk]) for chunk in own.split(32)])
            expected = float(largest(outputs, data.y[own]).double().mean())
        assert abs(block.metrics["loss"][client] - expected) < 1e-5
    # The same, whatever else is evaluated at a time.
    singly = [next(trainer.evaluate(trainer.initial(), np.array([k]), 1)) for k in range(3)]
    assert [b.metrics["loss"][0] for b in singly] == list(block.metrics["loss"])


def test_a_users_chain_of_modules_is_a_program_and_its_own_forward_is_not_overlooked():
    class Mixing(nn.Sequential):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    inner = make_mlp()
    mixing = Mixing(*inner)
    assert trainer_of(mixing, data=make_data(SIZES)).path.name == "plain"
    hooked = make_mlp()
    hooked[1].register_forward_pre_hook(lambda module, given: (given[0] - given[0].mean(0),))
    assert trainer_of(hooked, data=make_data(SIZES)).path.name == "plain"
    shared = nn.Linear(6, 6)
    other = nn.Linear(6, 6)
    other.weight = shared.weight
    tied = nn.Sequential(shared, nn.ReLU(), other, nn.ReLU(), nn.Linear(6, 3))
    assert trainer_of(tied, data=make_data(SIZES)).path.name != "layered"


def test_tensors_of_a_client_are_never_zeros_made_up(monkeypatch):
    seen = []

    def watched(data, index, dtype):
        seen.append(index)
        return real(data, index, dtype)

    real = ClientData.inputs
    data = make_data([3, 6])
    trainer = trainer_of(make_mlp(), data=data, batch=4)
    monkeypatch.setattr(ClientData, "inputs", watched)
    rows_of(trainer)
    owners = [set(own.tolist()) for own in data.indices]
    for index in seen:
        for client_index in index.reshape(-1, index.shape[-1]).tolist():
            assert any(set(client_index) <= own for own in owners)


def ranked(outputs, targets):
    """Share of the other examples that an example's score is above: nobody's own affair."""
    scores = outputs[:, 0]
    return (scores[:, None] > scores[None, :]).double().sum(1) / max(len(scores) - 1, 1)


class Ranked:
    """The same by a class with an attribute that it changes, as a user may write it."""

    def __init__(self):
        self.calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return ranked(outputs, targets) * self.calls


@pytest.mark.parametrize("model", ["read", "not read"])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_may_look_across_examples_is_computed_on_all_of_a_client_at_once(model, threads):
    data = make_data([150, 1, 0, 33, 64, 7])
    chosen = make_mlp() if model == "read" else Own(after=lambda y: y * 2 if (y > 1e9).any() else y)
    metrics = {"ranked": ranked, "object": Ranked()}
    trainer = trainer_of(chosen, nt_xent, data=data, metrics=metrics)
    trainer.evaluation.threads = threads
    (block,) = trainer.evaluate(trainer.initial(), np.arange(6), 1)
    for client in (0, 1, 3, 4, 5):
        own = torch.from_numpy(data.indices[client])
        with torch.no_grad():
            outputs = chosen(data.x[own])
        expected = ranked(outputs, None).mean()
        assert block.metrics["ranked"][client] == block.metrics["object"][client]
        assert abs(block.metrics["ranked"][client] - expected) < 1e-12
        expected = nt_xent(outputs, None).double().mean()
        assert abs(block.metrics["loss"][client] - expected) < 1e-5
    assert block.metrics["ranked"][2] == 0.0


def spread(outputs, targets):
    """A mean over examples for a user, who says so, and no code that can be read shows."""
    assert len(outputs) <= 32
    assert bool((targets >= 0).all())
    return outputs.std(1)


def test_what_is_declared_to_treat_each_example_by_itself_sees_chunks(monkeypatch):
    monkeypatch.setattr(spread, "across_batch", False, raising=False)
    monkeypatch.setattr(evaluation, "memory", lambda: 0)
    data = make_data([150])
    trainer = trainer_of(make_mlp(), data=data, metrics={"spread": spread})
    (block,) = trainer.evaluate(trainer.initial(), np.arange(1), 1)
    with torch.no_grad():
        expected = make_mlp()(data.x).std(1).double().mean()
    assert abs(block.metrics["spread"][0] - expected) < 1e-6


def exhausting(outputs, targets):
    return ranked(outputs, targets) + torch.empty(2**60).sum()


@pytest.mark.parametrize("metric", [ranked, exhausting])
def test_what_does_not_fit_in_memory_is_refused_with_what_to_do(metric, monkeypatch):
    if metric is ranked:
        monkeypatch.setattr(evaluation, "memory", lambda: 150 * 3 * 4 - 1)
    trainer = trainer_of(make_mlp(), data=make_data([0, 150]), metrics={"ranked": metric})
    with pytest.raises(FedsimError, match=r"'ranked' may look across .* all 150 .* across_batch"):
        next(trainer.evaluate(trainer.initial(), np.arange(2), 1))

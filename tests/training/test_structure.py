"""What is read of a model or a loss acts on each example by itself; the rest is not believed."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import make_data, make_mlp, reading_of
from torch import nn
from torch.fx.node import map_aggregate

from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.tasks.losses import CrossEntropy
from fedsim.training import ExamplePrivacy, Trainer
from fedsim.training.structure.functions import apply_rule, elementwise
from fedsim.training.structure.tables import FUNCTIONS, METHODS
from fedsim.training.structure.values import BATCH, Batched, Fixed, NodeCall


class Own(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, after=lambda y, model: y, before=None):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after, self.linear = before, after, nn.Linear(6, 3)
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x):
        return self.after(self.linear(x if self.before is None else self.before(x)), self)


READ = {
    "a constant": lambda y, m: torch.eye(3)[0] * y + (1 - y) * torch.ones(3),
    "a buffer": lambda y, m: y * m.kept,
    "a constant matrix": lambda y, m: (torch.eye(3) @ y.unsqueeze(2)).squeeze(2),
    "along an example": lambda y, m: y / y.sum(1, keepdim=True) + y.std(1, keepdim=True),
    "largest of an example": lambda y, m: y.max(1, keepdim=True).values + y.amin(-1, True),
    "by len": lambda y, m: y.view(len(y), -1, 1).view(-1, 3),
    "by shape": lambda y, m: y.reshape(y.shape[0], 1, y.shape[1]).flatten(1),
    "a token for each": lambda y, m: torch.cat([m.kept[None].expand(y.shape[0], -1), y], 1),
    "zeros for each": lambda y, m: torch.cat([y.new_zeros(y.shape[0], 1), y], 1),
    "chunks": lambda y, m: torch.cat(y.chunk(3, 1)[::-1], 1),
    "einsum": lambda y, m: torch.einsum("bi,ij->bj", y, torch.eye(3)),
    "in place": lambda y, m: F.relu(y.add_(1), inplace=True),
    "transposed": lambda y, m: y.unsqueeze(1).mT.squeeze(2).softmax(-1),
    "attention": lambda y, m: F.scaled_dot_product_attention(*[y.unsqueeze(2)] * 3).squeeze(2),
    "pooled": lambda y, m: F.max_pool1d(y.unsqueeze(1), 2).flatten(1),
    "there and back": lambda y, m: y.unsqueeze(1).transpose(0, 1).transpose(0, 1)[:, 0],
}

NOT_READ = {
    "mean of the batch": lambda y, m: y - y.mean(0),
    "mean of all": lambda y, m: y - y.mean(),
    "zero times a sum": lambda y, m: y + 0 * y.sum(),
    "relu of the largest": lambda y, m: y + torch.relu(y.max() - 100),
    "pairs": lambda y, m: (y.unsqueeze(0) - y.unsqueeze(1)).sum(1),
    "attention over the batch": lambda y, m: (y @ y.T).softmax(1) @ y,
    "its size": lambda y, m: y / len(y),
    "a branch on its size": lambda y, m: y - y.mean(0) if y.shape[0] > 64 else y,
    "a branch on a value": lambda y, m: y * 2 if (y > 100).any() else y,
    "positions": lambda y, m: y * torch.arange(len(y))[:, None],
    "rolled": lambda y, m: y.roll(1, 0),
    "summed up": lambda y, m: y.cumsum(0),
    "less the first": lambda y, m: y - y[:1],
    "sorted": lambda y, m: y.sort(0).values,
    "quantised": lambda y, m: (y / y.abs().max() * 15).round(),
    "batch norm": lambda y, m: F.batch_norm(y, None, None, training=True),
    "layer norm of all": lambda y, m: F.layer_norm(y, y.shape),
    "instance norm of all": lambda y, m: F.instance_norm(y[None])[0],
    "beside each other": lambda y, m: y.view(-1, 1).softmax(0).view(-1, 3),
    "transposed": lambda y, m: y.T.softmax(1).T,
    "squeezed": lambda y, m: y.squeeze(),
    "writes a buffer": lambda y, m: (m.kept.add_(1), y)[1],
    "writes through a view": lambda y, m: m.kept[None].expand(y.shape[0], -1).relu_() + y,
    "draws": lambda y, m: y + torch.randn(3),
    "no gradients": lambda y, m: y + torch.no_grad()(lambda z: 2 * z)(y),
    "a value": lambda y, m: y * y[:, 0].sum().item(),
    "by name": lambda y, m: y + torch.sum(input=y, dim=0),
    "as many classes as there are": lambda y, m: F.one_hot(y.argmax(1)).float(),
}


def read_token(y, model):
    return READ["a token for each"](y, model)


@pytest.mark.parametrize("name", READ)
def test_a_graph_that_is_read_gives_each_example_what_it_gives_it_alone(name):
    model = Own(READ[name])
    structure = reading_of(model, (6,)).structure
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    together = structure.module(x)
    torch.testing.assert_close(together, model(x))
    alone = torch.cat([structure.module(x[j : j + 1]) for j in range(5)])
    torch.testing.assert_close(together, alone)
    x[2] = torch.nan
    spoilt = structure.module(x)
    others = [0, 1, 3, 4]
    torch.testing.assert_close(spoilt[others], together[others])


class Defaults(Own):
    def forward(self, x, flip=True, scale=2.0, gate=None):
        return self.linear(scale * (-x if flip else x) if gate is None else x)


def test_an_argument_that_is_not_given_has_the_forwards_default():
    model, x = Defaults(), torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(reading_of(model, (6,)).structure.module(x), model(x))


@pytest.mark.parametrize("name", NOT_READ)
def test_what_may_look_across_a_batch_is_not_read(name):
    model = Own(NOT_READ[name])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    reading = reading_of(model, (6,))
    assert reading.model is None
    assert reading.why.startswith("the model's ")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


MODULES = {
    "numbers as features": (nn.Linear(5, 3), ()),
    "images as channels": (nn.Conv2d(3, 4, 2), (6, 6)),
    "sequence-first": (nn.TransformerEncoderLayer(6, 2, 8), (5, 6)),
    "batch norm": (nn.BatchNorm1d(6), (6,)),
    "softmax of the batch": (nn.Softmax(0), (6,)),
    "flattened": (nn.Flatten(0), (6,)),
    "a norm that is written to": (nn.InstanceNorm1d(5, track_running_stats=True), (5, 6)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_read_by_its_kind_settings_and_the_shape_it_is_given(name):
    module, shape = MODULES[name]
    assert reading_of(nn.Sequential(module, nn.Linear(6, 1)), shape).model is None


LOSSES = {
    "maximum": lambda o, y: CrossEntropy()(o, y) + o.max(),
    "mean": lambda o, y: F.cross_entropy(o, y),
    "pairs of numbers": lambda o, y: (o[:, :1] - y.float()).square().mean(1),
    "contrast": lambda o, y: (o @ o.T).logsumexp(1),
    "branch": lambda o, y: F.cross_entropy(o, y, reduction="none") * (2 if len(o) > 5 else 1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_may_look_across_a_batch_is_not_read(name):
    reading = reading_of(make_mlp(), (6,), LOSSES[name])
    assert reading.model is not None
    assert reading.loss is None
    assert reading.why.startswith("the loss's ")


def test_a_users_loss_is_read_and_its_graph_gives_the_same():
    def squared(outputs, targets):
        return (outputs.softmax(1) - torch.eye(3)[targets]).square().sum(-1)

    graph = reading_of(make_mlp(), (6,), squared).loss
    outputs, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    torch.testing.assert_close(graph(outputs, y), squared(outputs, y))
    smooth = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)
    graph = reading_of(make_mlp(), (6,), smooth).loss
    torch.testing.assert_close(graph(outputs, y), smooth(outputs, y))


def test_a_reading_travels_between_processes():
    trainer = Trainer(
        Own(read_token), SGD(lr=0.1), make_data([5, 3]), path="func", randomness=Randomness(1)
    )
    again = pickle.loads(pickle.dumps(trainer))
    rows = [next(t.train(t.initial(), np.arange(2), 1)).rows for t in (trainer, again)]
    assert torch.equal(*rows)


def private(model, loss=None, size=80):
    return Trainer(
        model, SGD(lr=0.1), make_data([size]), batch_size=size, loss=loss,
        randomness=Randomness(1), privacy=ExamplePrivacy(Clipping(0.5), 0.0),
    )  # fmt: skip


def within(values):
    ones = torch.ones(len(values), 1)
    ones[5:] = 3
    return values * ones


# Nothing of this shows among five made-up examples.
HIDDEN = {
    "centring above 5": (lambda: Own(before=lambda x: x - x.mean(0) if len(x) > 5 else x), None),
    "centring above 64": (lambda: Own(before=lambda x: x - x.mean(0) if len(x) > 64 else x), None),
    "any above 100": (lambda: Own(before=lambda x: x / 9 if (x > 100).any() else x), None),
    "relu of the largest": (lambda: Own(before=lambda x: x + (x.max() - 100).relu()), None),
    "attention above 5": (
        lambda: Own(before=lambda x: (x @ x.T).softmax(1) @ x if len(x) > 5 else x),
        None,
    ),
    "zero times a sum": (lambda: Own(lambda y, m: y + 0 * y.sum()), None),
    "positions from 5 on": (lambda: Own(lambda y, m: within(y)), None),
    "a loss with a maximum": (
        make_mlp,
        lambda o, y: CrossEntropy()(o, y) + (CrossEntropy()(o, y).max() - 20).relu(),
    ),
    "a quantiser": (
        lambda: Own(before=lambda x: x + (x.abs().amax() > 50) * (x / x.abs().amax()).round()),
        None,
    ),
}


@pytest.mark.parametrize("spoilt", [None, float("nan"), 1e3])
@pytest.mark.parametrize("name", HIDDEN)
def test_rows_are_those_of_examples_alone_whatever_stands_beside_them(name, spoilt):
    make, loss = HIDDEN[name]
    model = make()
    trainer = private(model, loss)
    way = trainer.rounds.private.method
    assert way.evidence == "one at a time: user code"
    x, y = trainer.data.x.clone(), trainer.data.y
    if spoilt is not None:
        x[3] = spoilt
    theta = trainer.packing.pack(trainer.initial()[None])
    (examples,) = way.rows(theta, x[None], y[None], [len(x)], None)
    rows = examples.rows.dense()[0]
    for j in (0, 2, 4, 5, 40, 79):
        losses = (loss or CrossEntropy())(model(x[j : j + 1]), y[j : j + 1])
        gradients = torch.autograd.grad(losses.sum(), list(model.parameters()))
        alone = torch.cat([gradient.flatten() for gradient in gradients])
        torch.testing.assert_close(rows[j], alone, rtol=1e-5, atol=1e-6)


class Counts(Own):
    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        return super().forward(x)


class Collects(Own):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach().sum())
        return super().forward(x)


class CountingLoss:
    def __init__(self):
        self.count = 0

    def __call__(self, outputs, y):
        self.count += 1
        return CrossEntropy()(outputs, y)


def test_a_model_or_a_loss_that_changes_an_attribute_is_refused():
    for model, loss, name in (
        (Counts(), None, "the model's count"),
        (Collects(), None, "the model's seen"),
        (make_mlp(), CountingLoss(), "the loss's count"),
        (make_mlp(), CountingLoss().__call__, "the loss's count"),
    ):
        with pytest.raises(FedsimError, match=f"{name} changes as examples go through"):
            private(model, loss)


class Remembers(Own):
    """Writes to a buffer, to an attribute and into a list, for large examples only."""

    def __init__(self):
        super().__init__()
        self.last, self.seen = 0.0, []

    def forward(self, x):
        if float(x.abs().max()) > 90:
            self.kept.copy_(x[0, :3])
            self.last, _ = 5.0, self.seen.append(1)
        return super().forward(x) * (1 + self.kept) + self.last + len(self.seen)


def test_each_example_begins_from_the_same_buffers_and_attributes():
    trainer = private(Remembers())
    theta = trainer.packing.pack(trainer.initial()[None])
    x, y = trainer.data.x, trainer.data.y
    (plain,) = trainer.rounds.private.method.rows(theta, x[None], y[None], [len(x)], None)
    spoilt = x.clone()
    spoilt[3] = 1e3
    (examples,) = trainer.rounds.private.method.rows(theta, spoilt[None], y[None], [len(x)], None)
    assert torch.equal(examples.rows.dense()[0, 4:], plain.rows.dense()[0, 4:])
    assert trainer.model.last == 0.0
    assert trainer.model.seen == []
    assert bool((trainer.model.kept == 1).all())


def test_a_model_that_takes_no_example_alone_is_refused_with_its_error():
    def several(x):
        if len(x) == 1:
            raise AssertionError("two at least")
        return x

    with pytest.raises(FedsimError, match=r"one example alone \(AssertionError: two at least\)"):
        private(Own(before=several))
    with pytest.raises(FedsimError, match="one example alone"):
        private(Own(lambda y, m: y.squeeze()))


def test_a_private_run_of_a_model_that_is_read_says_by_structure():
    trainer = private(make_mlp())
    assert trainer.rounds.private.method.evidence == "by structure"
    (block,) = trainer.train(trainer.initial(), np.arange(1), 1)
    assert torch.isfinite(block.rows).all()


@pytest.mark.slow
def test_a_dense_network_is_read_without_torchs_compiler():
    """Importing it would take over a second of every process."""
    code = (
        "import sys, torch; from torch import nn; from fedsim.tasks.losses import CrossEntropy; "
        "from fedsim.training.structure.reading import read; "
        "model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)); "
        "reading = read(model, CrossEntropy(), torch.zeros(2, 2, 2), torch.tensor([0, 1])); "
        "sys.exit(reading.why or bool({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SCRATCH, SEVERAL = torch.zeros(3), [torch.zeros(3)]
ARRAY = SCRATCH.numpy()


class Holder:
    scratch = torch.zeros(3)


def by_default(y, scratch=SCRATCH):
    return y + scratch


def closed_over(tensor):
    return lambda y, m: y * tensor


def set_data(y, other):
    y.data = other
    return y


def sliced(target, value):
    target[:, 0] = value
    return target


def added(target, value):
    target += value
    return target


OUTSIDE = {
    "a global": lambda y, m: y + SCRATCH,
    "an item of a global": lambda y, m: y + SCRATCH[0],
    "its number": lambda y, m: y + SCRATCH[0].item(),
    "made of a global": lambda y, m: y + torch.ones(3) * SCRATCH,
    "a list": lambda y, m: y + SEVERAL[0],
    "a closure": closed_over(torch.ones(3)),
    "a default": lambda y, m: by_default(y),
    "a class's attribute": lambda y, m: y + Holder.scratch,
    "an attribute": lambda y, m: y + m.plain,
    "its data": lambda y, m: y + SCRATCH.data,
    "numpy's view": lambda y, m: y + torch.from_numpy(ARRAY),
    "as a tensor": lambda y, m: y + torch.as_tensor(ARRAY),
    "memory": lambda y, m: y + torch.frombuffer(ARRAY, dtype=torch.float32),
    "a buffer's data": lambda y, m: y + m._buffers["kept"].data,
    "out": lambda y, m: torch.sum(y.mT, 1, out=SCRATCH),
    "out of a buffer": lambda y, m: torch.mul(y, 2, out=m.kept),
    "out of itself": lambda y, m: torch.mul(y, 2, out=y),
    "copy": lambda y, m: SCRATCH.copy_(y[0]) + y,
    "set": lambda y, m: SCRATCH.set_(y) + y,
    "set itself": lambda y, m: y.set_(SCRATCH),
    "data": lambda y, m: set_data(y, 2 * y),
    "an item": lambda y, m: sliced(y, 0.0),
    "an item of a global's": lambda y, m: sliced(SCRATCH[None], y[:, 0]) + y,
    "an item plus": lambda y, m: sliced(y, y[:, 0] + 1),
    "index_put": lambda y, m: y.index_put_((torch.tensor([0]),), torch.zeros(3)),
    "fill": lambda y, m: (m.kept.fill_(1), y)[1],
    "plus a global": lambda y, m: added(SCRATCH, y[0]) + y,
    "plus a buffer": lambda y, m: added(m.kept, y[0]) + y,
    "inplace of a buffer": lambda y, m: F.relu(m.kept, inplace=True) + y,
    "by position": lambda y, m: F.relu(m.kept, True) + y,
    "through views": lambda y, m: m.kept[None].expand(y.shape[0], 3).contiguous().add_(y),
    "resized": lambda y, m: y.resize_(3),
    "transposed in place": lambda y, m: y.t_(),
    "uninitialised": lambda y, m: y + torch.empty(3),
}


class Plain(Own):
    def __init__(self, after):
        super().__init__(after)
        self.plain = torch.ones(3)


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_uses_memory_from_outside_or_writes_to_it_is_not_read(name):
    model, before = Plain(OUTSIDE[name]), SCRATCH.clone()
    reading = reading_of(model, (6,))
    assert reading.model is None, name
    assert reading.why.startswith("the model's ")
    assert torch.equal(SCRATCH, before)
    assert bool((model.kept == 1).all())


def test_a_constant_is_the_graphs_own_as_it_was_where_it_was_used():
    def positions(y, m):
        table = torch.zeros(3)
        table[1:] = torch.arange(2) + 1
        SEVERAL.append(table)
        first = y + table
        table.mul_(10)
        return first + table.sin()

    model = Own(positions)
    structure = reading_of(model, (6,)).structure
    x = torch.randn(5, 6)
    wanted = model(x)
    for table in SEVERAL[1:]:
        table.fill_(torch.nan)
    del SEVERAL[1:]
    torch.testing.assert_close(structure.module(x), wanted)


def test_numbers_of_each_example_that_the_graph_made_may_change_in_place():
    layers = [nn.Linear(6, 3), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(3, 2)]
    for model in (
        nn.Sequential(*layers),
        nn.Sequential(nn.Linear(6, 3), nn.Hardtanh(inplace=True)),
        Own(lambda y, m: F.relu(y, inplace=True).add_(m.kept).clamp_(0, 1).mul_(y)),
    ):
        structure = reading_of(model, (6,)).structure
        assert structure is not None
        x = torch.randn(5, 6)
        torch.testing.assert_close(structure.module(x.clone()), model(x.clone()))


Y = Batched(torch.empty(BATCH, 3, device="meta"))
KEPT = Fixed(torch.empty(3, device="meta"))
VIEW = Batched(torch.empty(1, 3, device="meta").expand(BATCH, 3).contiguous(), 0, shared=True)
EXAMPLES = [
    (Y,), (Y, Y), (Y, 1), (Y, 1, 1), (Y, Y, Y), (Y, 2, 1), (Y, 0.5), (Y, [1]), ((Y, Y), 1),
    (Y, KEPT),
    (Batched(torch.empty(BATCH, 3, 3, device="meta")),) * 2,
    (Batched(torch.empty(BATCH, 3, 3, device="meta")),),
    (Batched(torch.empty(BATCH, 3, device="meta") > 0), Y, Y),
    (Batched(torch.empty(BATCH, 3, device="meta") > 0),),
    (Batched(torch.empty(BATCH, 3, device="meta").int()),),
    (Batched(torch.empty(BATCH, 3, device="meta").int()),) * 2,
]  # fmt: skip


def fresh(value):
    """A value in memory of its own: a call that writes may have resized the last one's."""
    if isinstance(value, Batched | Fixed):
        return replace(value, like=torch.empty_like(value.like))
    return value


def refused(function, rule, args, **kwargs):
    args, kwargs = (map_aggregate(values, fresh) for values in (args, kwargs))
    name = getattr(function, "__name__", str(function))
    try:
        apply_rule(NodeCall(name, function, args, kwargs), rule)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def names_in(table):
    return {
        getattr(key, "__name__", key): (
            getattr(torch.Tensor, key, None) if isinstance(key, str) else key,
            rule,
        )
        for key, rule in table.items()
    }


@pytest.mark.parametrize("table", [FUNCTIONS, METHODS], ids=["functions", "methods"])
def test_no_function_or_method_of_the_tables_writes_to_what_it_is_given(table):
    """By `out`, by `inplace`, and by its namesake that ends in an underscore."""
    tried = {"out": 0, "inplace": 0, "_": 0}
    for function, rule in names_in(table).values():
        for args in EXAMPLES:
            if function is None or refused(function, rule, args):
                continue
            result = apply_rule(NodeCall("", function, args, {}), rule)
            if isinstance(result, Batched):
                for out in (result, Fixed(torch.empty_like(result.like))):
                    tried["out"] += 1
                    assert refused(function, rule, args, out=out), (function, args)
            for first in (KEPT, VIEW):
                rest = args[1:] if isinstance(args[0], Batched) else ()
                tried["inplace"] += 1
                assert refused(function, rule, (first, *rest), inplace=True), (function, args)
                written = getattr(torch.Tensor, f"{getattr(function, '__name__', '')}_", None)
                if written is not None:
                    tried["_"] += 1
                    assert refused(written, rule, (first, *rest)), (function, args)
    assert min(tried.values()) > 50, tried


def writes_to_last(*tensors):
    tensors[-1].mul_(2)
    return tensors[0] + 0


def writes_through_a_view(*tensors):
    tensors[-1].data.view(-1)[:1].zero_()
    return tensors[0] + 0


def writes_by_out(*tensors):
    torch.add(tensors[-1], 1, out=tensors[-1])
    return tensors[0] + 0


@pytest.mark.parametrize("writes", [writes_to_last, writes_through_a_view, writes_by_out])
def test_a_new_function_of_a_table_cannot_forget_to_say_that_it_writes(writes):
    def lenient(call):
        return call.same_axis(call.results)

    def inattentive(call):
        return Y

    for rule in (elementwise, lenient, inattentive):
        for last in (KEPT, VIEW, Y):
            assert "writes to" in refused(writes, rule, (Y, last))
    assert "writes to" in refused(writes, lenient, (KEPT, KEPT))
    assert "writes to" in refused(writes, lenient, (Y,))


TOTAL, HIDDEN_SUM = torch.zeros(()), torch.zeros(3)


def accumulates(y, m):
    if float(y.detach().abs().max()) > 90:
        HIDDEN_SUM.add_(y.detach().sum(0))
    return y * (1 + HIDDEN_SUM)


def leaves_its_last(y, m):
    result = y * (1 + TOTAL)
    if float(y.detach().abs().max()) > 90:
        TOTAL.copy_(y.detach().amax().clamp(min=90) - 90)
    return result


def replaces(y, m):
    result = y + HIDDEN_SUM.sum()
    if float(y.detach().abs().max()) > 90:
        HIDDEN_SUM.set_(y.detach().flatten()[:2])
    return result


def into_scratch(y, m):
    result = y + HIDDEN_SUM
    if float(y.detach().abs().max()) > 90:
        torch.mul(y.detach()[0], 2, out=HIDDEN_SUM)
    return result


def by_sparse_rows(y, m):
    table = torch.nn.functional.embedding(y.argmax(1), m.linear.weight, sparse=True)
    return accumulates(y + table.sum(1, keepdim=True), m)


@pytest.mark.parametrize(
    "after", [accumulates, leaves_its_last, replaces, into_scratch, by_sparse_rows]
)
def test_examples_leave_nothing_to_each_other_in_tensors_outside_the_model(after):
    trainer = private(Own(after))
    method = trainer.rounds.private.method
    assert method.evidence == "one at a time: user code"
    theta = trainer.packing.pack(trainer.initial()[None])
    x, y = trainer.data.x, trainer.data.y
    spoilt = x.clone()
    spoilt[3] = 1e3
    rows = [
        next(iter(method.rows(theta, some[None], y[None], [len(x)], None))).rows.dense()[0]
        for some in (x, spoilt)
    ]
    changed = (rows[0] != rows[1]).any(1).nonzero().flatten()
    assert changed.tolist() == [3]
    assert HIDDEN_SUM.tolist() == [0.0] * 3
    assert float(TOTAL) == 0.0

"""Parameters and models that clients keep to themselves, against plain loops."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import joined, make_data, make_mlp
from torch import Tensor, nn

from fedsim.clients import SGD, AdadpLR, Ditto, FedNova, FedRep, Proximal
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.models.normalization import fix_normalisation, localise
from fedsim.randomness import Draws, Randomness
from fedsim.training import ExamplePrivacy, Trainer
from fedsim.training.payload import Personal, positions_of

SIZES = [4, 0, 9, 2]
HEAD = ("3.weight", "3.bias")
IDS = np.arange(len(SIZES))


def make_trainer(algorithm=None, personal=(), **settings) -> Trainer:
    model = make_mlp(dtype=torch.float64)
    settings = {"batch_size": 0, "steps": 2, "state": "client"} | settings
    return Trainer(
        model,
        algorithm or SGD(lr=0.3),
        make_data(SIZES, dtype=torch.float64),
        randomness=Randomness(1),
        personal=personal,
        **settings,
    )


def descend(model: nn.Module, x: Tensor, y: Tensor, lr: float, pull: float = 0.0, to=None) -> None:
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        anchors = list(to.parameters()) if to is not None else list(model.parameters())
        for parameter, gradient, anchor in zip(model.parameters(), gradients, anchors, strict=True):
            parameter -= lr * (gradient + pull * (parameter - anchor))


def flat(model: nn.Module, names: set[str] | None = None) -> Tensor:
    return torch.cat(
        [p.detach().flatten() for n, p in model.named_parameters() if not names or n in names]
    )


@pytest.mark.parametrize("path", ["plain", "func", "layered"])
def test_a_personal_head_is_trained_kept_and_never_sent(path: str) -> None:
    """FedPer by hand: three rounds of all clients, averaging the shared layers only."""
    t = make_trainer(personal=HEAD, path=path)
    shared = {"1.weight", "1.bias"}
    assert [entry.name for entry in t.layout.entries] == ["1.weight", "1.bias"]
    model = make_mlp(dtype=torch.float64)
    heads = {k: copy.deepcopy(model[3]) for k in IDS}
    vector = t.initial()
    torch.testing.assert_close(vector, flat(model, shared))
    for server_round in (1, 2, 3):
        rows = joined(t.train(vector, IDS, server_round))[0]
        assert rows.shape[1] == t.layout.d
        expected = []
        for k, own in enumerate(t.data.indices):
            local = copy.deepcopy(model)
            local[3] = copy.deepcopy(heads[k])
            for _ in range(2 if len(own) else 0):
                descend(local, t.data.x[own], t.data.y[own], 0.3)
            heads[k] = local[3]
            expected.append(flat(local, shared) - flat(model, shared))
        torch.testing.assert_close(rows, torch.stack(expected), rtol=1e-9, atol=1e-11)
        vector = vector + rows.mean(0)
        with torch.no_grad():
            moved = flat(model, shared) + torch.stack(expected).mean(0)
            model[1].weight.copy_(moved[:30].view(5, 6))
            model[1].bias.copy_(moved[30:])
    (block,) = t.evaluate(vector, IDS, 3)
    for k, own in enumerate(t.data.indices):
        if len(own):
            local = copy.deepcopy(model)
            local[3] = heads[k]
            loss = F.cross_entropy(local(t.data.x[own]), t.data.y[own]).item()
            assert block.metrics["loss"][k] == pytest.approx(loss, rel=1e-9)


def test_ditto_trains_a_model_of_its_own_beside_the_global_one() -> None:
    algorithm = Ditto(lr=0.3, own_lr=0.2, pull=0.5)
    t = make_trainer(algorithm, steps=4)
    model = make_mlp(dtype=torch.float64)
    own_models = {k: copy.deepcopy(model) for k in IDS}
    vector = t.initial()
    for server_round in (1, 2):
        rows = joined(t.train(vector, IDS, server_round))[0]
        expected = []
        for k, own in enumerate(t.data.indices):
            local = copy.deepcopy(model)
            if len(own):
                if server_round == 1:
                    own_models[k] = copy.deepcopy(model)
                for _ in range(2):
                    descend(local, t.data.x[own], t.data.y[own], 0.3)
                    descend(own_models[k], t.data.x[own], t.data.y[own], 0.2, 0.5, model)
            expected.append(flat(local) - flat(model))
        torch.testing.assert_close(rows, torch.stack(expected), rtol=1e-9, atol=1e-11)
        vector = vector + rows.mean(0)
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
    (block,) = t.evaluate(vector, IDS, 2)
    for k, own in enumerate(t.data.indices):
        if len(own):
            loss = F.cross_entropy(own_models[k](t.data.x[own]), t.data.y[own]).item()
            assert block.metrics["loss"][k] == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("kind", ["fedper", "ditto"])
def test_what_is_kept_does_not_depend_on_blocks_or_on_where_it_lies(
    kind: str, tmp_path: Path
) -> None:
    settings = {"personal": HEAD} if kind == "fedper" else {"algorithm": Ditto(), "steps": 4}
    one = make_trainer(**settings)
    others = [
        make_trainer(**settings, block_size=1),
        make_trainer(**settings, block_size=3),
        make_trainer(**settings, state_dir=tmp_path / "state"),
    ]
    for server_round in (1, 2):
        rows = joined(one.train(one.initial(), IDS, server_round))[0]
        (evaluated,) = one.evaluate(one.initial(), IDS, server_round)
        for other in others:
            again = joined(other.train(other.initial(), IDS, server_round))[0]
            assert torch.equal(again, rows)
            (block,) = other.evaluate(other.initial(), IDS, server_round)
            np.testing.assert_array_equal(block.metrics["loss"], evaluated.metrics["loss"])
    lent = one.copy_for("cpu")
    lent.restore(one.state())
    (block,) = lent.evaluate(one.initial(), IDS, 2)
    np.testing.assert_array_equal(block.metrics["loss"], evaluated.metrics["loss"])


def test_examples_are_protected_in_personal_parameters_too() -> None:
    t = make_trainer(
        personal=HEAD, batch_size=2, privacy=ExamplePrivacy(Clipping(1.0), 1.0), steps=3
    )
    rows = joined(t.train(t.initial(), IDS, 1))[0]
    assert rows.shape == (4, t.layout.d)
    assert rows[1].abs().sum() == 0
    assert rows[0].abs().sum() > 0


def test_keeping_parameters_needs_clients_that_keep_something() -> None:
    for settings in ({"personal": HEAD}, {"algorithm": Ditto()}):
        with pytest.raises(FedsimError, match=r"client\.state is 'reset'; it must be 'client'"):
            make_trainer(**settings, state="reset")
    names = [name for name, _ in make_mlp().named_parameters()]
    with pytest.raises(FedsimError, match=r"model\.personal leaves no trained parameter"):
        make_trainer(personal=names)


def test_clients_with_parameters_of_their_own_train_alike_on_another_path() -> None:
    t = make_trainer(personal=HEAD, path="plain")
    rows = joined(t.train(t.initial(), IDS, 1))[0]
    other = joined(t.on("layered").train(t.initial(), IDS, 1))[0]
    torch.testing.assert_close(other, rows, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("path", ["plain", "func", "layered"])
def test_fedrep_trains_the_head_first_and_then_the_body(path: str) -> None:
    """FedRep by hand: two steps of the head, one of the body, of which the body's is sent."""
    t = make_trainer(FedRep(lr=0.3, head_lr=0.2, head_steps=2), HEAD, steps=3, path=path)
    model, shared = make_mlp(dtype=torch.float64), {"1.weight", "1.bias"}
    heads = {k: copy.deepcopy(model[3]) for k in IDS}
    vector = t.initial()
    for server_round in (1, 2):
        rows = joined(t.train(vector, IDS, server_round))[0]
        expected = []
        for k, own in enumerate(t.data.indices):
            local = copy.deepcopy(model)
            local[3] = copy.deepcopy(heads[k])
            for step in range(3 if len(own) else 0):
                loss = F.cross_entropy(local(t.data.x[own]), t.data.y[own])
                turn, rate = (local[3], 0.2) if step < 2 else (local[1], 0.3)
                gradients = torch.autograd.grad(loss, list(turn.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(turn.parameters(), gradients, strict=True):
                        parameter -= rate * gradient
            heads[k] = local[3]
            expected.append(flat(local, shared) - flat(model, shared))
        torch.testing.assert_close(rows, torch.stack(expected), rtol=1e-9, atol=1e-11)
        vector = vector + rows.mean(0)
        with torch.no_grad():
            moved = flat(model, shared) + torch.stack(expected).mean(0)
            model[1].weight.copy_(moved[:30].view(5, 6))
            model[1].bias.copy_(moved[30:])
    (block,) = t.evaluate(vector, IDS, 2)
    for k, own in enumerate(t.data.indices):
        if len(own):
            local = copy.deepcopy(model)
            local[3] = heads[k]
            loss = F.cross_entropy(local(t.data.x[own]), t.data.y[own]).item()
            assert block.metrics["loss"][k] == pytest.approx(loss, rel=1e-9)


def test_fedrep_needs_to_know_what_is_the_head() -> None:
    with pytest.raises(FedsimError, match=r"model\.personal is empty; FedRep \(client\.name\)"):
        make_trainer(FedRep())


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)
    ).double()


@pytest.mark.parametrize("path", ["plain", "func"])
def test_fedbn_keeps_what_normalisation_layers_have_learnt(path: str) -> None:
    """FedBN: each client has scales and shifts of its own, and evaluates with them."""
    names = [f"2.{name}" for name, _ in nn.LayerNorm(5).named_parameters()]
    data = make_data(SIZES, dtype=torch.float64)
    settings = {"batch_size": 0, "steps": 2, "state": "client", "path": path}
    t = Trainer(
        normalised(), SGD(lr=0.3), data, randomness=Randomness(1), personal=names, **settings
    )
    model, shared = normalised(), {"1.weight", "1.bias", "4.weight", "4.bias"}
    norms = {k: copy.deepcopy(model[2]) for k in IDS}
    for server_round in (1, 2):  # the shared part stays: what differs is what clients keep
        rows = joined(t.train(t.initial(), IDS, server_round))[0]
        for k, own in enumerate(data.indices):
            local = copy.deepcopy(model)
            local[2] = copy.deepcopy(norms[k])
            for _ in range(2 if len(own) else 0):
                descend(local, data.x[own], data.y[own], 0.3)
            norms[k] = local[2]
            expected = flat(local, shared) - flat(model, shared)
            torch.testing.assert_close(rows[k], expected, rtol=1e-9, atol=1e-11)
    (block,) = t.evaluate(t.initial(), IDS, 2)
    for k, own in enumerate(data.indices):
        if len(own):
            local = copy.deepcopy(model)
            local[2] = norms[k]
            loss = F.cross_entropy(local(data.x[own]), data.y[own]).item()
            assert block.metrics["loss"][k] == pytest.approx(loss, rel=1e-9)


def batch_normalised() -> nn.Sequential:
    model = normalised()
    model[2] = nn.BatchNorm1d(5, momentum=0.3, dtype=torch.float64)
    return model


def fedbn(algorithm, sizes=SIZES, batch_size=3, **settings) -> Trainer:
    model = batch_normalised()
    names = [*localise(model, ["2.weight", "2.bias"]), "2.weight", "2.bias"]
    return Trainer(
        model,
        algorithm,
        make_data(sizes, dtype=torch.float64),
        batch_size=batch_size,
        epochs=2,
        state="client",
        personal=names,
        randomness=Randomness(1),
        **settings,
    )


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize(("decay", "mu"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.5)])
def test_batch_norm_is_kept_with_its_running_statistics_as_torchs_own(
    block_size: int, decay: float, mu: float
) -> None:
    """FedBN by hand, with a BatchNorm1d a client; batches of one are left to the statistics."""
    inner = SGD(lr=0.3, weight_decay=decay)
    t = fedbn(Proximal(inner, mu) if mu else inner, block_size=block_size)
    assert t.path.name == "plain"
    assert [e.name for e in t.layout.entries] == ["1.weight", "1.bias", "4.weight", "4.bias"]
    model, shared = batch_normalised(), {"1.weight", "1.bias", "4.weight", "4.bias"}
    norms = {k: copy.deepcopy(model[2]) for k in IDS}
    for server_round in (1, 2):
        rows = joined(t.train(t.initial(), IDS, server_round))[0]
        for k, own in enumerate(t.data.indices):
            local = copy.deepcopy(model)
            local[2] = copy.deepcopy(norms[k])
            started = copy.deepcopy(local)
            draws = Draws(Randomness(1), level="example", amplified=False, client=k)
            for epoch in range(2 if len(own) else 0):
                order = own
                if len(own) > 3:
                    order = own[draws.generator(server_round, epoch).permutation(len(own))]
                for first in range(0, len(own), 3):
                    batch = order[first : first + 3]
                    local.train(len(batch) > 1)
                    loss = F.cross_entropy(local(t.data.x[batch]), t.data.y[batch])
                    gradients = torch.autograd.grad(loss, list(local.parameters()))
                    with torch.no_grad():
                        for p, g, s in zip(
                            local.parameters(), gradients, started.parameters(), strict=True
                        ):
                            p -= 0.3 * (g + decay * p + mu * (p - s))
            norms[k] = local[2]
            expected = flat(local, shared) - flat(model, shared)
            torch.testing.assert_close(rows[k], expected, rtol=1e-9, atol=1e-11)
    (block,) = t.evaluate(t.initial(), IDS, 2)
    for k, own in enumerate(t.data.indices):
        if len(own):
            local = copy.deepcopy(model).eval()
            local[2] = norms[k].eval()
            loss = F.cross_entropy(local(t.data.x[own]), t.data.y[own]).item()
            assert block.metrics["loss"][k] == pytest.approx(loss, rel=1e-9)
    own = Personal.from_model(batch_normalised(), [])
    assert not any("running" in name for name in own.shared.slices)  # the server's never has them


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fedbn(Ditto()), r"'2' keeps running statistics of one model, and Ditto"),
        (lambda: fedbn(AdadpLR()), r"'2' keeps running statistics of one model, and AdadpLR"),
        (lambda: fedbn(SGD(), path="func"), r"client\.path = 'func' does not take .* statistics"),
        (
            lambda: fedbn(SGD(), privacy=ExamplePrivacy(Clipping(1.0), 1.0)),
            r"'2' normalises by the batch, so that no gradient belongs to one example",
        ),
        (
            lambda: localise(
                nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False)), ["0.weight", "0.bias"]
            ),
            r"'0' is a BatchNorm1d without running statistics, so that a client would evaluate",
        ),
        (
            lambda: localise(
                nn.Sequential(nn.BatchNorm1d(5, momentum=None)), ["0.weight", "0.bias"]
            ),
            r"'0' is a BatchNorm1d without momentum",
        ),
        (
            lambda: Trainer(batch_normalised(), SGD(), make_data(SIZES), randomness=Randomness(1)),
            r"or let clients keep it: model\.personal = '2\.\*'",
        ),
    ],
)
def test_batch_norm_that_no_client_could_keep_is_refused(make, words: str) -> None:
    with pytest.raises(FedsimError, match=words):
        make()


@dataclass(frozen=True)
class Listing(SGD):
    """Keeps a list of its steps."""

    steps: list[int] = field(default_factory=list)

    def step(self, state, gradient, at):
        self.steps.append(at.index)
        super().step(state, gradient, at)


def test_the_check_for_statistics_makes_its_steps_by_a_copy_of_the_algorithm() -> None:
    assert fedbn(Listing()).algorithm.steps == []


class NormalisedTwice(nn.Module):
    """Uses one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.one = self.other = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.other(self.one(self.first(x)).relu()))


def test_a_layer_with_two_names_is_replaced_as_one() -> None:
    kept = NormalisedTwice()
    assert localise(kept, ["one.weight", "one.bias"]) == ["one.running_mean", "one.running_var"]
    fixed, sentences = fix_normalisation(NormalisedTwice())
    assert len(sentences) == 1
    for model in (kept, fixed):
        assert model.one is model.other
        assert not isinstance(model.one, nn.BatchNorm1d)


def test_batch_norm_without_parameters_is_not_said_to_be_one_that_clients_could_keep() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, affine=False))
    with pytest.raises(FedsimError, match=r"'1' is a BatchNorm1d.* replace it\.$"):
        Trainer(model, SGD(), make_data(SIZES), randomness=Randomness(1))


def test_looking_for_draws_leaves_statistics_as_they_are() -> None:
    t = fedbn(SGD())
    mean = positions_of(t.personal.packing, ["2.running_mean"], t.device)
    assert t.personal.initial[mean].eq(0).all()
    assert dict(t.model.named_parameters())["2.running_mean"].eq(0).all()
    assert dict(t.model.named_parameters())["2.running_var"].eq(1).all()


def test_an_algorithm_that_scales_what_it_trained_is_refused() -> None:
    """It would scale what a client keeps, too, round after round."""
    with pytest.raises(FedsimError, match=r"model\.personal is set, but .* scales what a client"):
        make_trainer(personal=HEAD, algorithm=FedNova(lr=0.1, reach=10.0))

"""Frozen layers at the front of a model: gone through once, to the same end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clients_helpers import make_cnn, make_data
from torch import Tensor, nn

from fedsim.clients import SGD
from fedsim.randomness import Randomness
from fedsim.training import ClientData, Trainer
from fedsim.training import frozen_stem as module
from fedsim.training.frozen_stem import split_frozen_stem

SIZES = (5, 0, 11, 3)
IDS = np.arange(len(SIZES))


def stemmed(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    model = make_cnn(dtype=dtype)
    model[0].requires_grad_(False)
    return model


def clients(dtype: torch.dtype = torch.float64) -> ClientData:
    data = make_data(SIZES, features=36, dtype=dtype, shape=(1, 6, 6))
    unused = torch.zeros(4, 1, 6, 6, dtype=dtype)  # examples that nobody has
    return ClientData(
        torch.cat([unused, data.x]),
        torch.cat([data.y[:1].expand(4), data.y]),
        [own + 4 for own in data.indices],
        torch.tensor([[[0.1]]]),
        torch.tensor([[[2.0]]]),
    )


def trained(model: nn.Module, data: ClientData) -> tuple[Tensor, Tensor]:
    trainer = Trainer(model, SGD(lr=0.3), data, batch_size=4, epochs=2, randomness=Randomness(3))
    start = trainer.initial()
    values = next(iter(trainer.evaluate(start, IDS, 1))).metrics["loss"]
    return trainer.fit(start, IDS, 1).theta, torch.from_numpy(values)


def test_the_same_training_and_evaluation_as_through_the_whole_model() -> None:
    model, data = stemmed(), clients()
    rest, outputs = split_frozen_stem(model, data)
    assert [name for name, _ in rest.named_parameters()] == ["4.weight", "4.bias"]
    assert outputs.x.shape == (sum(SIZES), 8)  # examples that nobody has are left out
    assert [len(own) for own in outputs.indices] == [*SIZES]
    for whole, part in zip(trained(model, data), trained(rest, outputs), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-12)


def test_bits_of_an_example_do_not_depend_on_whose_else_there_are() -> None:
    data = clients(torch.float32)
    everybody = split_frozen_stem(stemmed(torch.float32), data)[1]
    for client, own in enumerate(data.indices):
        if not len(own):
            continue
        alone = ClientData(data.x, data.y, [own[::-1].copy()], data.mean, data.std)
        outputs = split_frozen_stem(stemmed(torch.float32), alone)[1]
        mine = everybody.indices[client]
        assert torch.equal(outputs.x[outputs.indices[0]], everybody.x[mine[::-1].copy()])
        assert torch.equal(outputs.y[outputs.indices[0]], everybody.y[mine[::-1].copy()])


def test_images_are_scaled_once() -> None:
    images = torch.randint(0, 256, (6, 1, 6, 6), dtype=torch.uint8)
    data = ClientData(images, torch.zeros(6, dtype=torch.int64), [np.arange(6)])
    model = stemmed(torch.float32)
    rest, outputs = split_frozen_stem(model, data)
    found = rest(outputs.inputs(torch.arange(6), torch.float32))
    torch.testing.assert_close(found, model(images.float() / 255), rtol=1e-5, atol=1e-6)


def doubled(_, inputs):
    return (2 * inputs[0],)


def test_a_model_whose_hooks_would_be_lost_is_not_split() -> None:
    model, data = stemmed(), clients()
    model.register_forward_pre_hook(doubled)
    assert split_frozen_stem(model, data) == (model, data)


def test_layers_that_differ_in_a_hook_share_no_outputs() -> None:
    data = clients()
    for has_hook in (True, False):
        model = stemmed()
        if has_hook:
            model[0].register_forward_pre_hook(doubled)
        rest, outputs = split_frozen_stem(model, data)
        inputs, found = (
            of.inputs(torch.from_numpy(of.indices[2]), torch.float64) for of in (data, outputs)
        )
        torch.testing.assert_close(rest(found), model(inputs))


def test_layers_that_differ_in_a_setting_that_torch_does_not_show_share_no_outputs() -> None:
    data = clients()
    for counted in (True, False):
        pool = nn.AvgPool2d(2, padding=1, count_include_pad=counted)
        model = nn.Sequential(*stemmed()[:1], pool, nn.Flatten(), nn.Linear(18, 3).double())
        rest, outputs = split_frozen_stem(model, data)
        inputs, found = (
            of.inputs(torch.from_numpy(of.indices[2]), torch.float64) for of in (data, outputs)
        )
        torch.testing.assert_close(rest(found), model(inputs))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many examples each call of the stem is for, with nothing kept at first."""
    counts: list[int] = []
    through = module._stem_outputs

    def counted(row: Tensor, stem: nn.Module, data: ClientData, examples: Tensor) -> Tensor:
        counts.append(len(examples))
        return through(row, stem, data, examples)

    monkeypatch.setattr(module, "_LATEST", {})
    monkeypatch.setattr(module, "_stem_outputs", counted)
    return counts


def test_outputs_are_computed_anew_only_where_the_stem_or_the_examples_differ(
    computed: list[int],
) -> None:
    data, model, every = clients(torch.float32), stemmed(torch.float32), sum(SIZES)
    first = split_frozen_stem(model, data)[1].x
    again = split_frozen_stem(stemmed(torch.float32), clients(torch.float32))[1].x
    assert torch.equal(again, first)
    assert computed == [every]
    changed = data.x.clone()
    changed[[5, 6]] += 1
    other_images = ClientData(changed, data.y, data.indices, data.mean, data.std)
    assert not torch.equal(split_frozen_stem(model, other_images)[1].x, first)
    assert computed == [every, every]
    other_scale = ClientData(data.x, data.y, data.indices, data.mean, data.std + 1e-6)
    assert not torch.equal(split_frozen_stem(model, other_scale)[1].x, first)
    with torch.no_grad():
        next(iter(model[0].parameters())).mul_(2)
    assert not torch.equal(split_frozen_stem(model, data)[1].x, first)
    assert computed == 4 * [every]


def test_however_examples_are_split_each_goes_through_once(computed: list[int]) -> None:
    data, model = clients(torch.float32), stemmed(torch.float32)
    held_out = ClientData(data.x, data.y, [data.indices[2][::-1].copy()], data.mean, data.std)
    rest = [data.indices[0], data.indices[3]]
    trained_on = ClientData(data.x, data.y, rest, data.mean, data.std)
    for split in (held_out, trained_on, data, held_out):
        outputs = split_frozen_stem(model, split)[1]
    assert computed == [SIZES[2], SIZES[0] + SIZES[3]]
    module._LATEST.clear()
    whole = split_frozen_stem(model, data)[1]
    assert torch.equal(outputs.x[outputs.indices[0]], whole.x[whole.indices[2][::-1].copy()])


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


@pytest.mark.parametrize(
    "model",
    [
        make_cnn(),
        nn.Sequential(nn.Flatten(), nn.Linear(36, 3)),
        nn.Sequential(Doubling(), *stemmed()),
        nn.Sequential(nn.Sequential(stemmed())[0], Doubling()),
    ],
    ids=["trained", "nothing-frozen", "unknown-first", "one-child"],
)
def test_a_model_without_a_frozen_front_of_known_layers_stays_whole(model: nn.Module) -> None:
    data = clients()
    assert split_frozen_stem(model, data) == (model, data)


def test_outputs_that_would_take_too_much_memory_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, data = stemmed(), clients()
    monkeypatch.setattr(module, "_LATEST", {})
    # The examples that nobody has do not count.
    monkeypatch.setattr(module, "MAX_BYTES", sum(SIZES) * 8 * 8 - 1)
    assert split_frozen_stem(model, data) == (model, data)
    monkeypatch.setattr(module, "MAX_BYTES", sum(SIZES) * 8 * 8)
    assert split_frozen_stem(model, data)[0] is not model


def test_masks_and_unusable_examples_stay_with_their_examples() -> None:
    data = clients(torch.float32)
    marks = np.arange(len(data.x)) % 3 == 0
    y = torch.arange(len(data.x))[:, None].expand(-1, 2).contiguous()
    mask = torch.from_numpy(np.stack([marks, ~marks], 1))
    own = [one[::-1].copy() for one in data.indices]
    marked = ClientData(data.x, y, own, mask=mask, unusable=marks)
    outputs = split_frozen_stem(stemmed(torch.float32), marked)[1]
    for before, after in zip(own, outputs.indices, strict=True):
        assert torch.equal(outputs.y[after], y[before])
        assert torch.equal(outputs.mask[after], mask[before])
        assert outputs.unusable[after].tolist() == marks[before].tolist()


def test_what_is_kept_never_takes_more_memory_than_one_run_may(
    monkeypatch: pytest.MonkeyPatch, computed: list[int]
) -> None:
    data, model = clients(torch.float32), stemmed(torch.float32)
    monkeypatch.setattr(module, "MAX_BYTES", sum(SIZES) * 8 * 4)
    for k in range(3):
        other = ClientData(data.x + k, data.y, data.indices, data.mean, data.std)
        split_frozen_stem(model, other)
    assert computed == 3 * [sum(SIZES)]
    assert [len(kept) for kept in module._LATEST.values()] == [1]


def test_clients_without_any_data_leave_the_model_whole() -> None:
    model, data = stemmed(), clients()
    nobody = ClientData(data.x, data.y, [np.zeros(0, np.int64)])
    assert split_frozen_stem(model, nobody) == (model, nobody)

"""Models by name and of the user's own, their sizes, seeds and what is trained of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedsim.allowed_code import allow
from fedsim.errors import FedsimError
from fedsim.models import build, fix_normalisation, freeze, refuse_running_statistics


def count(model: nn.Module, prefix: str = "") -> int:
    return sum(p.numel() for name, p in model.named_parameters() if name.startswith(prefix))


@pytest.mark.parametrize(
    ("name", "shape", "options", "parameters"),
    [
        ("softmax", (1, 28, 28), {}, 7850),
        ("softmax", (64,), {"bias": False}, 640),
        ("mlp", (1, 28, 28), {"widths": "256,256"}, 784 * 256 + 256 * 256 + 2560 + 522),
        ("mlp", (7,), {"widths": [5], "bias": False}, 85),
        ("adadp-mnist", (1, 28, 28), {}, 334336),
        ("adadp-mnist", (1, 28, 28), {"bias": True}, 334336 + 3 * 256 + 10),
        ("adadp-cifar", (3, 32, 32), {}, 38720 + 1055000),
        ("adadp-cifar", (3, 32, 32), {"bias": True}, 38720 + 1055000 + 1010),
    ],
)
def test_models_have_the_sizes_of_their_papers(
    name: str, shape: tuple[int, ...], options: dict[str, object], parameters: int
) -> None:
    model = build(name, shape, 10, **options)
    assert count(model) == parameters
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_the_cifar_network_splits_into_convolutions_and_dense_layers() -> None:
    model = build("adadp-cifar", (3, 32, 32), 10)
    assert count(model, "conv") == 38720
    assert count(model, "fc") == 1055000
    assert [name for name, _ in model.named_parameters()] == [
        "conv1.weight",
        "conv1.bias",
        "conv2.weight",
        "conv2.bias",
        "fc1.weight",
        "fc2.weight",
        "fc3.weight",
    ]


@pytest.mark.parametrize("side", [13, 14, 15, 28, 33])
def test_the_cifar_network_fits_other_image_sizes(side: int) -> None:
    model = build("adadp-cifar", (1, side, side + 3), 7)
    assert model(torch.zeros(2, 1, side, side + 3)).shape == (2, 7)


@pytest.mark.parametrize("shape", [(64,), (3, 12, 32)])
def test_the_cifar_network_refuses_what_is_too_small(shape: tuple[int, ...]) -> None:
    with pytest.raises(FedsimError, match="at least 13x13"):
        build("adadp-cifar", shape, 10)


def test_dense_models_are_plain_stacks() -> None:
    kinds = [type(module) for module in build("mlp", (1, 4, 4), 10, widths="3,2").children()]
    assert kinds == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]


def test_the_initialisation_is_a_function_of_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        return build("softmax", (64,), 10, seed=seed).state_dict()["fc1.weight"]

    first = weights(3)
    torch.manual_seed(17)
    assert torch.equal(weights(3), first)
    assert not torch.equal(weights(4), first)


def test_building_leaves_the_global_generator_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build("softmax", (64,), 10, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_float64_starts_from_the_numbers_of_float32() -> None:
    single = build("softmax", (64,), 10, seed=1)
    double = build("softmax", (64,), 10, seed=1, dtype=torch.float64)
    for one, other in zip(single.parameters(), double.parameters(), strict=True):
        assert other.dtype == torch.float64
        assert torch.equal(one.double(), other)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("resnet", {}, "'resnet'; it must be 'adadp-cifar', 'adadp-mnist', 'hf', 'mlp'"),
        ("mlp", {}, "model.widths is not set; it must be given: hidden units"),
        ("mlp", {"widths": "256,x"}, "model.widths is '256,x'"),
        ("mlp", {"widths": [2.7]}, r"model.widths is '\[2.7\]'; it must give each layer's hidden"),
        ("mlp", {"widths": "256,0"}, "whole numbers from 1 to 10,000,000"),
        (
            "softmax",
            {"widths": "9"},
            "model.widths is not a setting of 'softmax'; it takes bias.",
        ),
        ("softmax", {"dtype": torch.float16}, "must be float32, float64 or bfloat16"),
        ("nets.py/x:Net", {}, "written module:name"),
        ("no_such_module_here:Net", {}, "neither a file no_such_module_here.py in"),
        ("torch.nn:NoSuchThing", {}, "'torch.nn' has no callable 'NoSuchThing'"),
        ("torch.nn:Linear", {}, r"model\.options\.in-features is not set; it must be given"),
        ("torch.nn:utils.rnn.PackedSequence", {}, r"a class that is not a torch\.nn\.Module"),
        ("numpy:add.reduce", {}, "a builtin_function_or_method whose module is unknown"),
        ("torch.nn:utils.rnn.pad_sequence", {}, r"model\.options\.sequences is not set"),
        ("numpy:identity", {"n": 1}, r"returns ndarray; it must return a torch\.nn\.Module"),
    ],
)
def test_wrong_names_and_options_end_with_their_sentence(
    name: str, options: dict[str, object], sentence: str
) -> None:
    allow(["torch.nn", "numpy"])
    with pytest.raises(FedsimError, match=sentence):
        build(name, (64,), 10, **options)


NETS = """
from dataclasses import dataclass

import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, num_classes, width=3):
        super().__init__()
        self.out = nn.Linear(64, num_classes)
    def forward(self, x):
        return self.out(x)

def both(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], num_classes))

def neither(width=4, depth=2):
    return nn.Linear(64, 10)

def normed():
    return nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10))

def lazy():
    return nn.LazyLinear(10)

def broken():
    raise RuntimeError("the user's own")

def by_position(features, /, num_classes):
    return nn.Linear(64, num_classes)

@dataclass
class Recipe:
    width: int = 3
    def __call__(self, num_classes, depth):
        return nn.Linear(64, num_classes)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in the current directory."""
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("attribute", ["Small", "both", "neither"])
def test_a_users_model_is_found_and_given_the_keywords_it_takes(nets: str, attribute: str) -> None:
    model = build(f"{nets}:{attribute}", (64,), 10, dtype=torch.float64, seed=2)
    assert model(torch.zeros(2, 64, dtype=torch.float64)).shape == (2, 10)
    again = build(f"{nets}:{attribute}", (64,), 10, dtype=torch.float64, seed=2)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [("by_position", "needs 'features' by position"), ("Recipe", "needs the argument 'depth'")],
)
def test_a_users_model_that_needs_what_it_is_not_given_is_refused(
    nets: str, attribute: str, message: str
) -> None:
    with pytest.raises(FedsimError, match=message):
        build(f"{nets}:{attribute}", (64,), 10)


def test_a_users_lazy_layers_are_refused(nets: str) -> None:
    with pytest.raises(FedsimError, match="lazy layers"):
        build(f"{nets}:lazy", (64,), 10)


def test_errors_of_the_users_code_come_through(nets: str) -> None:
    with pytest.raises(RuntimeError, match="the user's own"):
        build(f"{nets}:broken", (64,), 10)


def test_a_users_module_that_lacks_something_says_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_nets.py").write_text("import surely_not_installed\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        build("lacking_nets:Net", (64,), 10)


def test_patterns_freeze_everything_else() -> None:
    model = build("adadp-cifar", (3, 32, 32), 10)
    assert freeze(model, "fc*") == ["fc1.weight", "fc2.weight", "fc3.weight"]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 1055000


def test_several_patterns_are_joined_and_none_leaves_the_model_as_it_is() -> None:
    model = build("mlp", (64,), 10, widths="5")
    assert len(freeze(model, "")) == 4
    assert freeze(model, "fc1.bias, fc2.*") == ["fc1.bias", "fc2.weight", "fc2.bias"]


def test_a_pattern_without_a_match_lists_the_names() -> None:
    with pytest.raises(FedsimError, match=r"'conv\*', which matches no .* fc1\.weight, fc1\.bias"):
        freeze(build("softmax", (64,), 10), "fc*,conv*")


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(FedsimError, match="at least one"):
        freeze(nn.Flatten())


def test_running_statistics_are_refused_with_the_cure(nets: str) -> None:
    with pytest.raises(FedsimError, match=r"1 \(BatchNorm1d\), .*GroupNorm"):
        refuse_running_statistics(build(f"{nets}:normed", (64,), 10))


@pytest.mark.parametrize(
    "layer",
    [nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)],
)
def test_layers_without_running_statistics_are_accepted(layer: nn.Module) -> None:
    refuse_running_statistics(nn.Sequential(nn.Linear(3, 4), layer))


def test_fixing_puts_group_norm_for_batch_norm_and_leaves_the_rest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3),
        nn.BatchNorm2d(48),
        nn.Sequential(nn.InstanceNorm2d(48, track_running_stats=True), nn.LayerNorm(6)),
    ).double()
    convolution = model[0].weight.clone()
    fixed, said = fix_normalisation(model)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert (fixed[1].num_groups, fixed[1].num_channels) == (16, 48)
    assert fixed[1].weight.dtype == torch.float64
    assert fixed[2][0].running_mean is None
    assert torch.equal(fixed[0].weight, convolution)
    assert [sentence.split(" is ")[0] for sentence in said] == ["model.fix: 1", "model.fix: 2.0"]
    refuse_running_statistics(fixed)
    assert fix_normalisation(fixed) == (fixed, [])


def test_a_fixed_model_gives_an_example_the_same_whoever_stands_beside_it() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    fixed, _ = fix_normalisation(model)
    x = torch.randn(5, 6)
    others = torch.cat([x[:1], 7 * torch.randn(4, 6)])
    assert torch.equal(fixed(x)[0], fixed(others)[0])
    assert not torch.equal(fixed(x)[0], fixed(x)[1])  # features in groups of one would be zero


def test_a_layer_that_opacus_has_no_cure_for_is_refused_by_name() -> None:
    class Mine(nn.BatchNorm1d):
        pass

    with pytest.raises(FedsimError, match=r"model\.fix = true, but .* 0 \(Mine\)"):
        fix_normalisation(nn.Sequential(Mine(4)))

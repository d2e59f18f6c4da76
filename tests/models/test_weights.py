"""Starting from saved parameters: what is taken, what stays, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsim.errors import FedsimError
from fedsim.models import build, load_weights, values_of
from fedsim.models.parameters import matching


def model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return build("mlp", (6,), 3, widths="4", seed=seed, dtype=dtype)


def saved(path: Path, values: dict[str, Tensor]) -> Path:
    try:
        save_file(values, path / "own.safetensors")
    except KeyError as dtype:
        pytest.skip(f"this safetensors cannot write {dtype}")
    return path / "own.safetensors"


def test_a_model_takes_every_parameter_of_the_file(tmp_path: Path) -> None:
    mine, other = model(1), model(2)
    names = load_weights(mine, saved(tmp_path, values_of(other)))
    assert names == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert all(
        torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True)
    )


def test_patterns_take_some_of_them_from_a_file_that_may_hold_more(tmp_path: Path) -> None:
    mine, other, before = model(1), model(2), model(1)
    path = saved(tmp_path, {**values_of(other), "head.weight": torch.zeros(1)})
    assert load_weights(mine, path, "fc1.*") == ["fc1.weight", "fc1.bias"]
    assert torch.equal(mine.get_parameter("fc1.weight"), other.get_parameter("fc1.weight"))
    assert torch.equal(mine.get_parameter("fc2.weight"), before.get_parameter("fc2.weight"))


def test_a_float64_model_keeps_its_dtype(tmp_path: Path) -> None:
    mine, other = model(1, torch.float64), model(2)
    load_weights(mine, saved(tmp_path, values_of(other)))
    assert mine.get_parameter("fc1.weight").dtype is torch.float64
    assert torch.equal(mine.get_parameter("fc1.weight"), other.get_parameter("fc1.weight").double())


def test_buffers_are_values_too_and_shared_parameters_are_held_once(tmp_path: Path) -> None:
    def made() -> nn.Sequential:
        shared = nn.Linear(2, 2)
        return nn.Sequential(shared, nn.BatchNorm1d(2), shared)

    mine, other = made(), made()
    torch.nn.init.ones_(other.get_buffer("1.running_mean"))
    names = load_weights(mine, saved(tmp_path, values_of(other)))
    assert "1.running_mean" in names
    assert "2.weight" not in names
    assert torch.equal(mine.get_buffer("1.running_mean"), other.get_buffer("1.running_mean"))
    assert torch.equal(mine.get_parameter("0.weight"), other.get_parameter("0.weight"))


@pytest.mark.parametrize(
    ("changes", "patterns", "sentence"),
    [
        ({"fc2.bias": None}, "", r"lacks fc2\.bias and holds fc1\.bias, .*model\.weights-for"),
        ({"fc2.bias": None}, "fc2.*", r"lacks fc2\.bias"),
        ({"more": torch.zeros(1)}, "", r"holds more, which the model does not have"),
        ({"fc2.bias": torch.zeros(4)}, "", r"shape \(4,\) for fc2\.bias; it must be \(3,\)"),
        ({"fc2.bias": torch.full((3,), torch.nan)}, "", r"NaN, infinite or .* in fc2\.bias"),
        (
            {"fc2.bias": torch.full((3,), 1e300, dtype=torch.float64)},
            "",
            r"too large numbers in fc2\.bias; every number must be finite in torch\.float32",
        ),
        (
            {"fc2.bias": torch.zeros(3, dtype=torch.complex64)},
            "",
            r"complex64 for fc2\.bias; it must be one that fits torch\.float32",
        ),
        ({"fc2.bias": torch.zeros(3, dtype=torch.int64)}, "", r"dtype torch\.int64 for fc2\.bias"),
        ({}, "conv*", r"model\.weights-for has the pattern 'conv\*', which matches no parameter"),
    ],
)
def test_a_file_that_does_not_fit_is_one_sentence_and_changes_nothing(
    tmp_path: Path, changes: dict[str, Tensor | None], patterns: str, sentence: str
) -> None:
    mine, before = model(1), model(1)
    values = {k: v for k, v in {**values_of(model(2)), **changes}.items() if v is not None}
    with pytest.raises(FedsimError, match=sentence):
        load_weights(mine, saved(tmp_path, values), patterns)
    assert all(
        torch.equal(a, b) for a, b in zip(mine.parameters(), before.parameters(), strict=True)
    )


def test_a_file_that_is_not_there_or_no_safetensors_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match=r"model\.weights = '.*none', but there is no such file"):
        load_weights(model(1), tmp_path / "none")
    (tmp_path / "text").write_text("no weights")
    with pytest.raises(FedsimError, match=r"model\.weights = '.*text' is not a readable"):
        load_weights(model(1), tmp_path / "text")


def test_a_pattern_that_matches_nothing_of_a_large_model_names_the_nearest_parameters() -> None:
    names = [f"layer{k}.{part}" for k in range(50) for part in ("weight", "bias")]
    with pytest.raises(FedsimError, match=r"the model has .*layer9\.weight.* and 92 others\.$"):
        matching("model.trainable", "layers9.weight", names)
    with pytest.raises(FedsimError, match=r"has layer0\.weight, layer0\.bias, layer1\.weight\.$"):
        matching("model.trainable", "fc", names[:3])

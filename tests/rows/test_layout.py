from __future__ import annotations

import pytest
import torch
from release_helpers import releaser
from torch import nn

from fedsim.mechanisms import Clipping
from fedsim.rows import DenseRows, Layout

ARRAYS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "steps": torch.tensor(5),
    "b": torch.tensor(7.0, dtype=torch.float64),
    "mask": torch.tensor([True, False]),
    "c": torch.tensor([8.0, 9.0]),
}


def test_floating_entries_follow_one_another_and_others_are_kept_out() -> None:
    layout = Layout.of(ARRAYS)
    assert layout.d == 9
    assert layout.untrained == ("steps", "mask")
    assert [(e.name, e.start, e.stop) for e in layout.entries] == [
        ("a", 0, 6),
        ("b", 6, 7),
        ("c", 7, 9),
    ]


def test_a_row_has_the_widest_dtype_of_its_entries() -> None:
    assert Layout.of(ARRAYS).dtype == torch.float64
    assert Layout.of({"a": ARRAYS["a"]}).dtype == torch.float32


def test_arrays_are_paired_by_name_not_by_position() -> None:
    layout = Layout.of(ARRAYS)
    shuffled = {name: ARRAYS[name] for name in ("c", "steps", "b", "mask", "a")}
    assert torch.equal(layout.flatten(shuffled), layout.flatten(ARRAYS))
    assert layout.flatten(ARRAYS).tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]


def test_unflatten_undoes_flatten_whatever_the_leading_axes() -> None:
    layout = Layout.of(ARRAYS)
    row = layout.flatten(ARRAYS)
    named = layout.unflatten(row.expand(3, 2, 9))
    assert named["a"].shape == (3, 2, 2, 3)
    assert named["b"].shape == (3, 2)
    assert torch.equal(layout.flatten({k: v[1, 1] for k, v in named.items()}), row)


@pytest.mark.parametrize(
    ("change", "message"), [({"a": torch.zeros(3, 2)}, "shape"), ({"a": None}, "missing")]
)
def test_a_missing_or_misshapen_entry_is_named(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    arrays = {k: v for k, v in {**ARRAYS, **change}.items() if v is not None}
    with pytest.raises(ValueError, match=f"'a'.*{message}"):
        Layout.of(ARRAYS).flatten(arrays)


def test_there_must_be_something_to_train() -> None:
    with pytest.raises(ValueError, match="floating"):
        Layout.of({"steps": torch.tensor(1)})


@pytest.mark.parametrize("length", [0.1, 100.0])
def test_integer_buffers_are_no_part_of_what_is_bounded(length: float) -> None:
    model = nn.BatchNorm1d(4)
    layout = Layout.of(dict(model.state_dict()))
    assert layout.untrained == ("num_batches_tracked",)
    rows = torch.full((1, layout.d), length)
    total = releaser(Clipping(1.0), layout).start({})
    assert total.add(DenseRows(rows)).tolist() == [True]

"""Data of every kind: tokens, numbers, vectors, masks, owners, mapped folders; and bad ones."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import fedsim
from fedsim.datasets import Dataset, Split, dataset_of, load
from fedsim.errors import FedsimError
from fedsim.runs.data_split import resolve_data
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.training import ClientData

Arrays = dict[str, npt.NDArray[Any]]


def arrays(**changes: Any) -> Arrays:
    """Token sequences with masks and owners."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 9, (8, 5))
    made: dict[str, Any] = {
        "x_train": tokens,
        "y_train": np.roll(tokens, -1, 1),
        "mask_train": np.arange(5) < rng.integers(0, 6, (8, 1)),
        "owner_train": np.array(["ann", "bo", "bo", "cem", "ann", "dora", "ann", "bo"]),
        "x_test": tokens[:4],
        "y_test": tokens[:4],
        "mask_test": np.ones((4, 5), bool),
        "owner_test": np.array(["ann", "zoe", "bo", "bo"]),
    }
    made |= changes
    return {name: np.asarray(array) for name, array in made.items() if array is not None}


def stored(folder: Path, contents: Arrays, mapped: bool) -> str:
    if not mapped:
        np.savez_compressed(folder / "own.npz", **contents)
        return str(folder / "own.npz")
    (folder / "own").mkdir()
    for name, array in contents.items():
        np.save(folder / "own" / f"{name}.npy", array)
    return str(folder / "own")


@pytest.mark.parametrize("mapped", [False, True])
def test_tokens_masks_and_owners_come_as_they_are(tmp_path: Path, mapped: bool) -> None:
    made = arrays()
    data = load(stored(tmp_path, made, mapped))
    assert (data.num_classes, data.vocabulary, data.num_outputs) == (9, 9, 9)
    assert data.input_shape == (5,)
    assert data.train.mask is not None
    np.testing.assert_array_equal(data.train.x.numpy(), made["x_train"])
    np.testing.assert_array_equal(data.train.mask.numpy(), made["mask_train"])
    assert data.train.columns["owner"].tolist() == made["owner_train"].tolist()
    assert data.test.columns["owner"][1] == "zoe"
    ranged = data.ranged("2:6", ":3")
    assert ranged.train.columns["owner"].tolist() == ["bo", "cem", "ann", "dora"]
    assert torch.equal(ranged.train.mask, data.train.mask[2:6])
    assert len(ranged.test) == 3
    with pytest.raises(FedsimError, match=r"data\.test = '5:'.*the test examples"):
        data.ranged("", "5:")


@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize("kind", ["npz", "npy", "python"])
def test_classes_and_tokens_outside_the_range_do_not_count(
    tmp_path: Path, kind: str, protected: bool
) -> None:
    y = np.repeat(np.arange(5), 4)
    x = np.stack([y, y + 1], 1)
    made = {"x_train": x, "y_train": y, "x_test": x[::2], "y_test": y[::2]}
    ranges = {"train": ":13", "test": ":6"}  # classes 0 to 3, and 0 to 2
    if kind == "python":
        entries: dict[str, Any] = {f"data.{key}": value for key, value in ranges.items()}
        entries["partition.clients"] = 2
        entries |= {"mechanism.name": "clipping", "noise.multiplier": 1.0} if protected else {}
        config = fedsim.RunConfig().replace(**entries)
        overrides = ObjectOverrides(data=dataset_of(made, protected=protected))
        data = resolve_data(config, overrides).dataset
    else:
        data = load(stored(tmp_path, made, kind == "npy"), protected=protected, **ranges)
    sizes = (3, 4) if protected else (4, 5)
    assert (data.num_classes, data.vocabulary) == sizes
    assert data.found_in == dict.fromkeys(
        ("classes", "vocabulary"), "test" if protected else "train"
    )
    unusable = data.train.columns.get("unusable")
    assert protected is (unusable is not None and unusable.tolist() == [False] * 12 + [True])
    assert max(int(data.train.y.max()), int(data.test.y.max())) < data.num_classes


def test_a_range_of_data_without_test_examples_is_one_of_the_training_examples() -> None:
    train = Split(torch.ones(6, 2), torch.arange(6))
    data = Dataset("mine", train, train[:0], 6)
    assert len(data.ranged("2:4").train) == 2
    assert not len(data.ranged("2:4").test)


@pytest.mark.parametrize(
    ("targets", "outputs"),
    [
        (np.linspace(0, 1, 8), 1),
        (np.linspace(0, 1, 8).astype(">f8"), 1),
        (np.ones((8, 3), np.float32), 3),
        (np.ones((8, 4), bool), 4),
        (np.ones((8, 3), np.float16), 3),
    ],
)
def test_targets_may_be_numbers_and_vectors_and_labels(
    tmp_path: Path, targets: npt.NDArray[Any], outputs: int
) -> None:
    made = arrays(y_train=targets, y_test=targets[:4], mask_train=None, mask_test=None)
    data = load(stored(tmp_path, made, mapped=False))
    assert (data.num_classes, data.num_outputs) == (0, outputs)
    np.testing.assert_allclose(data.train.y.numpy(), targets)
    clients = ClientData(data.train.x, data.train.y, [np.arange(8)])
    gathered = clients.targets(torch.tensor([1, 0]), torch.float32)
    assert gathered.dtype == torch.float32


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (np.zeros((8, 6), np.float16), (6,)),
        (np.zeros((8, 6), ">f4"), (6,)),
        (np.zeros((8, 6), np.longdouble), (6,)),
        (np.asfortranarray(np.arange(48.0).reshape(8, 6)), (6,)),
        (np.zeros((8, 5, 4), np.uint8), (1, 5, 4)),
        (np.zeros((8, 5, 4), np.float32), (1, 5, 4)),
        (np.zeros((8, 5, 4, 3), np.float32), (3, 5, 4)),
        (np.zeros((8, 5, 4, 3, 2), np.float32), (5, 4, 3, 2)),
        (np.arange(40).reshape(8, 5).astype(np.uint16), (5,)),
        (np.arange(40).reshape(8, 5).astype(np.int8), (5,)),
        (np.arange(40).reshape(8, 5).astype(">i8"), (5,)),
    ],
)
def test_inputs_of_any_dtype_and_order_are_taken(
    tmp_path: Path, x: npt.NDArray[Any], shape: tuple[int, ...]
) -> None:
    made = arrays(x_train=x, x_test=x[:4])
    data = load(stored(tmp_path, made, mapped=False))
    assert data.input_shape == shape
    clients = ClientData(data.train.x, data.train.y, [np.arange(8)])
    batch = clients.inputs(torch.tensor([3, 7]), torch.float32)
    if x.ndim == 2:
        np.testing.assert_allclose(batch.numpy(), x[[3, 7]].astype(np.float64))
    assert batch.dtype == (torch.int64 if x.dtype.kind in "iu" and x.ndim == 2 else torch.float32)


def test_layout_as_is_leaves_sequences_of_features_alone(tmp_path: Path) -> None:
    x = np.zeros((8, 50, 3), np.float32)
    path = stored(tmp_path, arrays(x_train=x, x_test=x[:4]), mapped=False)
    assert load(path).input_shape == (1, 50, 3)
    assert load(path, layout="as-is").input_shape == (50, 3)


def test_a_folder_stays_in_its_files(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (8, 6, 5, 3), dtype=np.uint8)
    path = stored(tmp_path, arrays(x_train=x, x_test=x[:4]), mapped=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory that it must not write to
        data = load(path)
    # A change of the file is a change of the tensor, so it holds no copy.
    file = np.load(Path(path) / "x_train.npy", mmap_mode="r+")
    file[3, 2, 1, 0] ^= 255
    file.flush()
    assert data.train.x[3, 0, 2, 1] == file[3, 2, 1, 0]
    clients = ClientData(data.train.x, data.train.y, [np.arange(8)])
    batch = clients.inputs(torch.tensor([3]), torch.float32)
    np.testing.assert_allclose(batch[0].numpy(), file[3].transpose(2, 0, 1) / np.float32(255))
    assert clients.x.data_ptr() == data.train.x.data_ptr()


def test_a_label_of_minus_100_is_said_to_need_a_mask(tmp_path: Path) -> None:
    path = stored(tmp_path, arrays(y_test=np.full((4, 5), -100)), mapped=False)
    with pytest.raises(FedsimError, match=r"label -100 in y_test; .* and mask_test must be false"):
        load(path)


def test_features_are_normalised_by_declared_numbers(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(3, 2, (8, 2)).astype(np.float32)
    numbers = {"mean": np.array([3.0, 2.0]), "std": np.array([2.0, 4.0])}
    made = arrays(x_train=x, x_test=x[:4], **numbers)
    assert load(stored(tmp_path, made, mapped=False), normalize=True).std == (2.0, 4.0)


@pytest.mark.parametrize("mapped", [False, True])
def test_classes_are_declared_or_found_and_it_is_known_where(tmp_path: Path, mapped: bool) -> None:
    tokens = np.full((4, 5), 3)
    path = stored(tmp_path, arrays(x_test=tokens, y_test=tokens), mapped)
    assert load(path).found_in == {"classes": "train", "vocabulary": "train"}
    assert load(path, classes=20, vocabulary=30).found_in == {}
    assert load(path, classes=20).num_classes == 20
    with pytest.raises(FedsimError, match=r"label \d in y_train; labels must be below 4, the decl"):
        load(path, classes=4)
    with pytest.raises(FedsimError, match="token 8 in x_train; tokens must be below 5, the decl"):
        load(path, vocabulary=5)
    with pytest.raises(FedsimError, match=r"data.classes .* is 2,000,000; .* and 1,000,000"):
        load(path, classes=2_000_000)


def test_a_file_may_declare_its_sizes(tmp_path: Path) -> None:
    declared = {"classes": np.array(12), "vocabulary": np.array([15])}
    data = load(stored(tmp_path, arrays(**declared), mapped=False))
    assert (data.num_classes, data.vocabulary, data.found_in) == (12, 15, {})
    with pytest.raises(FedsimError, match=r"vocabulary is 9\.5, not a whole number"):
        load(stored(tmp_path, arrays(vocabulary=9.5), mapped=False))


def test_what_the_mask_leaves_out_is_not_looked_at(tmp_path: Path) -> None:
    made = arrays()
    made["y_train"][~made["mask_train"]] = -1
    assert load(stored(tmp_path, made, mapped=False)).num_classes == 9
    numbers = np.where(made["mask_train"], 1.5, np.nan)
    floats = arrays(y_train=numbers, y_test=np.ones((4, 5)))
    data = Dataset.from_arrays(
        "floats",
        {"x": floats["x_train"], "y": numbers, "mask": made["mask_train"]},
        {"x": floats["x_test"], "y": floats["y_test"]},
    )
    assert data.num_outputs == 5


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "mask of another shape": ({"mask_train": np.ones((8, 4), bool)}, "one boolean for each target"),
    "mask of one axis": ({"mask_train": np.ones(8, bool)}, "one boolean for each target"),
    "mask of numbers": ({"mask_train": np.full((8, 5), 2)}, "must hold one boolean"),
    "mask of floats": ({"mask_train": np.ones((8, 5))}, "must hold one boolean"),
    "mask of nothing": (
        {"mask_train": np.zeros((8, 5), bool), "mask_test": np.zeros((4, 5), bool)},
        "leaves out every label",
    ),
    "mask below 0": ({"mask_train": np.full((8, 5), -1)}, "below 0 in mask_train"),
    "owners too few": ({"owner_train": np.arange(7)}, "owner_train of shape"),
    "owners of two axes": ({"owner_train": np.zeros((8, 1))}, "owner_train of shape"),
    "owners of times": ({"owner_train": np.zeros(8, "M8[s]")}, "owner_train of shape"),
    "a token of 10^9": ({"x_train": np.full((8, 5), 10**9)}, "token 1000000000 in x_train"),
    "a token below 0": ({"x_train": np.full((8, 5), -1)}, "the token -1 in x_train"),
    "a class of 10^9": ({"y_train": np.full((8, 5), 10**9)}, "label 1000000000 in y_train"),
    "complex targets": ({"y_train": np.zeros((8, 5), complex)}, "y_train of dtype complex"),
    "no outputs": ({"y_train": np.zeros((8, 0)), "mask_train": None}, "y_train of shape"),
    "other classes": ({"y_test": np.zeros((4, 5))}, "only the number of examples may differ"),
    "two classes sizes": ({"classes": np.array([3, 4])}, "not one number"),
    "classes of words": ({"classes": np.array("ten")}, "could not be read"),
    "NaN targets": (
        {"y_train": np.full(8, np.nan), "y_test": np.zeros(4), "mask_train": None,
         "mask_test": None},
        "NaN or infinite numbers in y_train",
    ),
    "classes of numbers": (
        {"y_train": np.zeros(8), "y_test": np.zeros(4), "classes": np.array(3),
         "mask_train": None, "mask_test": None},
        "data.classes is 3, but y_train of .* is float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_arrays_that_do_not_belong_together_end_with_a_sentence(
    tmp_path: Path, case: str, mapped: bool
) -> None:
    changes, sentence = BAD[case]
    with pytest.raises(FedsimError, match=sentence) as caught:
        load(stored(tmp_path, arrays(**changes), mapped))
    assert str(caught.value).endswith(".")
    assert "own" in str(caught.value)


@pytest.mark.parametrize("mapped", [False, True])
def test_objects_are_never_unpickled(tmp_path: Path, mapped: bool) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    for key in ("x_train", "owner_train", "mean"):
        folder = tmp_path / key
        folder.mkdir()
        made = arrays(**{key: np.array([Bomb()] * 8, dtype=object)})
        with pytest.raises(FedsimError, match="could not be read"):
            load(stored(folder, made, mapped))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "could not be read"),
        (b"\x93NUMPY\x01\x00\x06\x00{}    ", "could not be read"),
        (
            b"\x93NUMPY\x01\x00\x76\x00"
            + b"{'descr': '<i8', 'fortran_order': False, 'shape': (8, 1260903000000), }".ljust(117)
            + b"\n",
            "could not be read",
        ),
    ],
)
def test_a_header_that_claims_more_than_its_file_allocates_nothing(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    path = stored(tmp_path, arrays(), mapped=True)
    (Path(path) / "x_train.npy").write_bytes(content)
    with pytest.raises(FedsimError, match=sentence):
        load(path)


def test_arrays_of_other_lengths_are_refused_by_their_headers_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = arrays(x_train=np.zeros((100_000, 5), np.int64))
    np.savez_compressed(tmp_path / "bomb.npz", **bomb)
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("an array is read"))
    with pytest.raises(FedsimError, match="100000 examples in x_train but 8 labels in y_train"):
        load(str(tmp_path / "bomb.npz"))


def test_a_folder_of_other_files_ends_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="lacks x_train, y_train, x_test, y_test and holds none"):
        load(str(tmp_path))
    with pytest.raises(FedsimError, match=r"data\.columns is 'x=a,y=b'"):
        load(stored(tmp_path, arrays(), mapped=True), columns="x=a,y=b")


def test_sizes_of_known_data_are_not_to_be_declared() -> None:
    with pytest.raises(FedsimError, match=r"data\.classes is not a setting of 'digits'"):
        load("digits", classes=11)


def test_a_number_in_a_folder_that_is_none_is_blamed_by_its_own_file(tmp_path: Path) -> None:
    for name, array in {"x": np.ones((4, 2)), "y": np.arange(4)}.items():
        for split in ("train", "test"):
            np.save(tmp_path / f"{name}_{split}.npy", array)
    np.save(tmp_path / "classes.npy", np.float64("nan"))
    with pytest.raises(FedsimError, match=r"^classes\.npy of .* could not be read"):
        load(str(tmp_path))

"""Named data sets and arrays of the user's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import URLError

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torchvision
from sklearn.datasets import load_digits

from fedsim.datasets import Dataset, load
from fedsim.errors import FedsimError

Arrays = dict[str, npt.NDArray[Any]]


def images(shape: tuple[int, ...] = (6, 5, 4), classes: int = 3) -> Arrays:
    """Small uint8 images with labels, the same number for training and test."""
    rng = np.random.default_rng(0)
    labels = np.arange(shape[0]) % classes
    return {
        "x_train": rng.integers(0, 256, shape, dtype=np.uint8),
        "y_train": labels,
        "x_test": rng.integers(0, 256, shape, dtype=np.uint8),
        "y_test": labels,
    }


def written(folder: Path, arrays: Arrays, name: str = "own.npz") -> str:
    path = folder / name
    np.savez(path, **arrays)
    return str(path)


def test_digits_are_the_real_ones_scaled_to_one_and_each_is_in_one_part() -> None:
    data = load("digits")
    assert data.train.x.shape == (1437, 64)
    assert data.test.x.shape == (360, 64)
    assert data.num_classes == 10
    assert data.input_shape == (64,)
    assert data.train.x.min() == 0
    assert data.train.x.max() == 1
    whole = load_digits()
    rows = torch.cat([data.train.x, data.test.x]).numpy() * 16
    labels = torch.cat([data.train.y, data.test.y]).numpy()
    ours = np.column_stack([rows, labels])
    theirs = np.column_stack([whole.data, whole.target])
    np.testing.assert_array_equal(np.unique(ours, axis=0), np.unique(theirs, axis=0))
    assert len(np.unique(theirs, axis=0)) == 1797


def test_digits_have_the_same_share_of_each_class_in_the_test_part() -> None:
    data = load("digits")
    train, test = torch.bincount(data.train.y), torch.bincount(data.test.y)
    assert (test - (train + test) / 5).abs().max() < 1


def test_grey_images_stay_uint8_and_get_a_channel(tmp_path: Path) -> None:
    arrays = images((6, 5, 4))
    data = load(written(tmp_path, arrays))
    assert data.train.x.dtype == torch.uint8
    assert data.input_shape == (1, 5, 4)
    np.testing.assert_array_equal(data.train.x[:, 0].numpy(), arrays["x_train"])
    assert data.num_classes == 3
    assert data.test.y.dtype == torch.int64
    assert data.mean is None


def test_colour_images_come_channels_first(tmp_path: Path) -> None:
    arrays = images((6, 5, 4, 3))
    data = load(written(tmp_path, arrays))
    assert data.test.x.shape == (6, 3, 5, 4)
    assert data.test.x.is_contiguous()
    np.testing.assert_array_equal(data.test.x[:, 2].numpy(), arrays["x_test"][..., 2])


@pytest.mark.parametrize("dtype", ["float32", "float64", ">f4"])
def test_float_features_are_taken_as_they_are(tmp_path: Path, dtype: str) -> None:
    arrays = images()
    for key in ("x_train", "x_test"):
        arrays[key] = np.arange(12.0).reshape(6, 2).astype(dtype)
    data = load(written(tmp_path, arrays))
    assert data.input_shape == (2,)
    assert data.train.x.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    np.testing.assert_array_equal(data.train.x.numpy(), arrays["x_train"])


def test_a_named_set_is_read_from_an_npz_in_the_directory(tmp_path: Path) -> None:
    arrays = images((6, 28, 28), classes=6)
    written(tmp_path, arrays, "fashion_mnist.npz")
    data = load("fashion-mnist", directory=tmp_path)
    assert data.name == "fashion-mnist"
    assert data.source.endswith("fashion_mnist.npz")
    assert data.mean is None
    assert load("fashion-mnist", directory=tmp_path, normalize=True).std == (0.3530,)


def test_a_named_set_is_read_from_torchvisions_own_files(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    arrays = images((6, 28, 28), classes=6)
    for part, prefix in (("train", "train"), ("test", "t10k")):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"].astype(np.uint8)
        for array, kind, magic in ((x, "images-idx3", 0x803), (y, "labels-idx1", 0x801)):
            header = np.array([magic, *array.shape], dtype=">i4").tobytes()
            (raw / f"{prefix}-{kind}-ubyte").write_bytes(header + array.tobytes())
    data = load("fashion-mnist", directory=tmp_path)
    assert data.input_shape == (1, 28, 28)
    np.testing.assert_array_equal(data.train.x[:, 0].numpy(), arrays["x_train"])
    np.testing.assert_array_equal(data.test.y.numpy(), arrays["y_test"])


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_missing_files_end_with_the_three_cures_and_download_nothing(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(FedsimError, match=r"data\.dir .* data\.download = true") as caught:
        load(name, directory=tmp_path)
    assert f"{name}.npz" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class Remote:
    """Stands in for torchvision's CIFAR10, which checks its files' sums."""

    asked: ClassVar[list[tuple[str, bool, bool]]] = []
    error: ClassVar[Exception | None] = None

    def __init__(self, root: str, train: bool, download: bool) -> None:
        self.asked.append((root, train, download))
        if self.error is not None:
            raise self.error
        self.data = images((6, 32, 32, 3))["x_train"]
        self.targets = [0, 1, 2, 0, 1, 2]


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> type[Remote]:
    class Fresh(Remote):
        asked: ClassVar[list[tuple[str, bool, bool]]] = []

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Fresh)
    return Fresh


@pytest.mark.parametrize("download", [False, True])
def test_torchvision_may_download_only_when_asked_to(
    tmp_path: Path, remote: type[Remote], download: bool
) -> None:
    data = load("cifar10", directory=tmp_path, download=download)
    assert remote.asked == [
        (str(tmp_path), True, download),
        (str(tmp_path), False, download),
    ]
    assert data.train.x.shape == (6, 3, 32, 32)
    assert data.train.y.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_download_that_fails_says_why_and_what_else_there_is(
    tmp_path: Path, remote: type[Remote]
) -> None:
    remote.error = URLError("no route to host")
    with pytest.raises(FedsimError, match=r"failed \(.*no route to host.*\); set data\.dir"):
        load("cifar10", directory=tmp_path, download=True)


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(
        FedsimError,
        match=r"'minst'; did you mean 'mnist'\? It must be one of celeba, cifar10, .*npz",
    ):
        load("minst")


def test_an_own_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match=r"no-such\.npz"):
        load("no-such.npz", directory=tmp_path)


def test_an_own_file_is_also_looked_for_in_the_directory(tmp_path: Path) -> None:
    written(tmp_path, images(), "mine.npz")
    assert load("mine.npz", directory=tmp_path).num_classes == 3
    (tmp_path / "mine.npz").rename(tmp_path / "MINE.NPZ")
    assert load("MINE.NPZ", directory=tmp_path).num_classes == 3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"y_train": None}, "lacks y_train and holds x_train"),
        ({"y_train": np.arange(5)}, "6 examples in x_train but 5 labels in y_train"),
        ({"y_test": np.array([0, 1, -2, 0, 1, 2])}, "the label -2 in y_test"),
        ({"y_test": np.arange(6) / 2}, r"y_test of shape \(6,\) \(float64\); .* may differ"),
        ({"y_test": np.eye(6, dtype=int)}, r"y_test of shape \(6, 6\) \(int64\); .* may differ"),
        ({"y_test": np.full(6, "a")}, "y_test of dtype <U1; labels must be integers"),
        ({"y_train": np.array(3)}, r"y_train of shape \(\); labels must be \[N\]"),
        ({"x_train": np.zeros((6, 5, 4), int)}, r"x_train of shape \(6, 5, 4\) \(int64\)"),
        ({"x_train": np.zeros((6, 4), np.uint8)}, r"x_train of shape \(6, 4\) \(uint8\)"),
        ({"x_train": np.zeros(6)}, r"x_train of shape \(6,\); images must be"),
        ({"x_train": np.zeros((6, 3, 32, 32), np.uint8)}, "looks channels first"),
        ({"x_train": np.full((6, 4), np.nan)}, "NaN or infinite numbers in x_train"),
        ({"x_train": np.zeros((6, 5, 5), np.uint8)}, "only the number of examples may differ"),
        ({"x_train": np.zeros((0, 5, 4), np.uint8)}, r"x_train of shape \(0, 5, 4\)"),
        ({"x_train": np.array([None] * 6)}, "could not be read .*plain arrays"),
        ({"x_train": np.full((6, 4), np.longdouble("1e4000"))}, "NaN or infinite numbers in x_t"),
        ({"classes": np.array(3j)}, "classes is 3j, not a whole number"),
    ],
)
def test_arrays_that_cannot_be_used_end_with_their_sentence(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    arrays = {k: v for k, v in {**images(), **change}.items() if v is not None}
    with pytest.raises(FedsimError, match=sentence) as caught:
        load(written(tmp_path, arrays))
    assert "own.npz" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04 broken"])
def test_a_file_that_is_no_npz_ends_with_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "own.npz"
    path.write_bytes(content)
    with pytest.raises(FedsimError, match=r"must be an \.npz of plain arrays"):
        load(str(path))


def test_a_bare_npy_ends_with_a_sentence(tmp_path: Path) -> None:
    with (tmp_path / "own.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(FedsimError, match="holds one array"):
        load(str(tmp_path / "own.npz"))


def test_an_own_file_is_normalised_by_its_own_numbers(tmp_path: Path) -> None:
    numbers = {"mean": np.array([0.1, 0.2, 0.3]), "std": np.array([0.4, 0.5, 0.6])}
    path = written(tmp_path, {**images((6, 5, 4, 3)), **numbers})
    assert load(path).mean is None
    data = load(path, normalize=True)
    assert data.mean == (0.1, 0.2, 0.3)
    assert data.std == (0.4, 0.5, 0.6)


@pytest.mark.parametrize(
    "numbers",
    [
        {"mean": np.zeros(1)},
        {"mean": np.zeros(2), "std": np.ones(2)},
        {"mean": np.zeros(1), "std": np.zeros(1)},
        {"mean": np.zeros(1), "std": np.full(1, 1e-320)},
        {"mean": np.zeros(1), "std": np.full(1, np.inf)},
        {"mean": np.full(1, 1e39), "std": np.ones(1)},
    ],
)
def test_unusable_numbers_for_normalising_end_with_a_sentence(
    tmp_path: Path, numbers: Arrays
) -> None:
    path = written(tmp_path, {**images(), **numbers})
    with pytest.raises(FedsimError, match="mean"):
        load(path, normalize=True)


@pytest.mark.parametrize("own", [True, False])
def test_normalising_without_numbers_is_refused(tmp_path: Path, own: bool) -> None:
    name = written(tmp_path, images()) if own else "digits"
    with pytest.raises(FedsimError, match=r"data\.normalize is true"):
        load(name, normalize=True)


def test_moving_a_data_set_keeps_its_dtypes() -> None:
    data = load("digits").to("meta")
    assert isinstance(data, Dataset)
    assert data.train.x.device.type == data.test.y.device.type == "meta"
    assert data.train.x.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "shape", "n"), [("mnist", (1, 28, 28), 60000), ("cifar10", (3, 32, 32), 50000)]
)
def test_the_real_ones_have_their_known_sizes_and_means(
    name: str, shape: tuple[int, ...], n: int
) -> None:
    folder = os.environ.get("FEDSIM_DATA", "data")
    try:
        data = load(name, directory=folder, normalize=True)
    except FedsimError as error:
        pytest.skip(f"needs real data (FEDSIM_DATA or ./data): {error}")
    assert data.train.x.shape == (n, *shape)
    assert data.test.x.shape == (10000, *shape)
    assert data.num_classes == 10
    assert data.train.x.dtype == torch.uint8
    means = np.asarray(data.train.x.numpy().mean(axis=(0, 2, 3)) / 255)
    assert data.mean is not None
    np.testing.assert_allclose(means, data.mean, atol=2e-3)


def test_a_range_of_the_training_examples_is_kept_and_all_test_examples(tmp_path: Path) -> None:
    path = written(tmp_path, images())
    whole = load(path)
    for train, kept in (("2:", slice(2, 6)), (":2", slice(0, 2)), ("1:3", slice(1, 3))):
        part = load(path, train=train)
        assert torch.equal(part.train.x, whole.train.x[kept])
        assert torch.equal(part.train.y, whole.train.y[kept])
        assert torch.equal(part.test.x, whole.test.x)
        assert part.num_classes == whole.num_classes


@pytest.mark.parametrize("train", ["6:", "3:3", "3:1", ":7", "0:0", "a:b", "-5:", "5"])
def test_a_range_that_the_training_examples_do_not_have_names_the_key(
    tmp_path: Path, train: str
) -> None:
    with pytest.raises(FedsimError, match=rf"data\.train = '{train}'.* within 0:6, the training"):
        load(written(tmp_path, images()), train=train)


def test_a_member_whose_name_has_a_newline_splits_no_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **{"a\nb_train": np.zeros(2), "x_train": np.zeros(2)})
    with pytest.raises(FedsimError, match=r"lacks y_train.* holds a\?b_train, x_train") as caught:
        load(str(tmp_path / "own.npz"))
    assert "\n" not in str(caught.value)
    arrays = {"x": np.ones((4, 2), np.float32), "y": np.array([0, 1, 0, 1]), "a\nb": np.zeros(9)}
    np.savez(tmp_path / "own.npz", **{f"{k}_{s}": v for k, v in arrays.items() for s in SPLITS})
    assert load(str(tmp_path / "own.npz")).train.columns == {}  # as any other entry


SPLITS = ("train", "test")


@pytest.mark.filterwarnings("error")
def test_a_header_beyond_its_file_is_refused_before_numpy_overflows(tmp_path: Path) -> None:
    for name in ("x_train", "y_train", "x_test", "y_test"):
        np.save(tmp_path / f"{name}.npy", np.zeros((4, 2), np.float32))
    with open(tmp_path / "x_train.npy", "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (2**33, 2**33)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(32))
    with pytest.raises(FedsimError, match=r"x_train\.npy could not be read \(its header claims"):
        load(str(tmp_path))


def test_a_spreadsheet_is_told_how_to_become_a_table() -> None:
    with pytest.raises(
        FedsimError, match=r"a spreadsheet; it must be a path to .*: save it as .csv"
    ) as caught:
        load("people.xlsx")
    assert "did you mean" not in str(caught.value)

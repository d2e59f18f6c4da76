"""Data sets of Hugging Face, from local files; skipped where what reads them is not installed."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim import RunConfig
from fedsim.config.release_keys import modules_in_config
from fedsim.datasets import NamedTensors, load
from fedsim.datasets.files import data_files
from fedsim.errors import FedsimError


def test_a_folder_of_datasets_says_what_it_needs_where_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FedsimError, match=r"pip install 'fedsim-dp\[flwr-datasets\]'"):
        load(str(tmp_path), columns="x=image,y=label")


def test_columns_of_a_saved_data_set_become_arrays(tmp_path: Path) -> None:
    pytest.importorskip("flwr_datasets")
    import datasets

    def split(n: int) -> datasets.Dataset:
        return datasets.Dataset.from_dict(
            {
                "features": np.arange(4.0 * n).reshape(n, 4).tolist(),
                "label": (np.arange(n) % 3).tolist(),
                "writer": [f"writer {k % 2}" for k in range(n)],
                "ragged": [list(range(k % 3)) for k in range(n)],
            }
        )

    path = str(tmp_path / "saved")
    datasets.DatasetDict({"train": split(9), "test": split(4)}).save_to_disk(path)
    data = load(path, columns="x=features,y=label,owner=writer")
    np.testing.assert_array_equal(data.train.x.numpy(), np.arange(36.0).reshape(9, 4))
    assert data.train.columns["owner"].tolist()[:2] == ["writer 0", "writer 1"]
    assert data.num_classes == 3
    for columns, sentence in {
        "": r"data\.columns is ''",
        "x=features,y=label,x=writer": r"data\.columns is .*; it must say, each once",
        "x=ragged,y=label": "cannot become an array",
        "x=nothing,y=label": "no column 'nothing'",
    }.items():
        with pytest.raises(FedsimError, match=sentence):
            load(path, columns=columns)


def write_parquet(path: Path, **columns: object) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)


def image(level: int) -> dict[str, object]:
    file = io.BytesIO()
    Image.new("L", (6, 5), level).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": f"{level}.png"}


def test_a_data_set_of_the_hub_is_read_from_its_parquet_files(tmp_path: Path) -> None:
    place = tmp_path / "data" / "flwrlabs" / "femnist"
    for number in range(2):  # as refs/convert/parquet has them
        levels = [20 * number + k for k in range(3)]
        write_parquet(
            place / f"default/train/000{number}.parquet",
            image=[image(level) for level in levels],
            character=[1, 2, 61],
            writer_id=["f1", "f1", "f2"],
        )
    columns = "x=image,y=character,owner=writer_id"
    data = load("hf:flwrlabs/femnist", directory=tmp_path / "data", columns=columns, classes=62)
    assert (data.train.x.shape, data.train.x.dtype) == ((5, 1, 5, 6), torch.uint8)
    # Without test files every fifth example is one.
    assert data.train.x[:, 0, 0, 0].tolist() == [0, 1, 2, 20, 22]
    assert data.test.x[:, 0, 0, 0].tolist() == [21]
    assert data.train.columns["owner"].tolist() == ["f1", "f1", "f2", "f1", "f2"]
    assert data.num_classes == 62
    same = load(str(place), columns=columns, classes=62)
    assert torch.equal(same.train.x, data.train.x)
    # Of a private run they are its own data under either name.
    assert data_files("hf:flwrlabs/femnist", tmp_path / "data") == data_files(str(place), Path("."))


def test_the_files_of_each_split_are_known_by_their_paths(tmp_path: Path) -> None:
    for split, count in (("train", 4), ("validation", 3), ("test", 2)):
        write_parquet(
            tmp_path / f"data/{split}-00000-of-00001.parquet",
            features=[[float(k), 1.0, 2.0] for k in range(count)],
            label=list(range(count)),
        )
    data = load(str(tmp_path), columns="x=features,y=label")
    assert (data.train.x.shape, len(data.test)) == ((4, 3), 2)
    assert data.train.x[:, 0].tolist() == [0, 1, 2, 3]
    for columns, sentence in {
        "": r"data\.columns is ''",
        "x=features,y=class": "no column 'class' in its split train, but features, label",
    }.items():
        with pytest.raises(FedsimError, match=sentence):
            load(str(tmp_path), columns=columns)
    write_parquet(tmp_path / "other/train.parquet", features=[[1.0]], label=[0])
    with pytest.raises(FedsimError, match="those of one configuration"):
        load(str(tmp_path), columns="x=features,y=label")


@pytest.mark.parametrize("damage", ["truncated", "wrong", "empty"])
def test_a_damaged_parquet_file_is_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "train.parquet"
    write_parquet(file, x=[[1.0]] * 9, y=[0] * 9)
    content = file.read_bytes()
    half = content[: len(content) // 2]
    file.write_bytes({"truncated": half, "wrong": b"x,y\n1,2\n", "empty": b""}[damage])
    with pytest.raises(FedsimError, match=r"train\.parquet could not be read .*a parquet file"):
        load(str(tmp_path), columns="x=x,y=y")


@pytest.mark.parametrize(
    "values", [[[1.0], [1.0, 2.0], [1.0]], [["a"], ["b"], ["c"]], [None, [1.0], [2.0]]]
)
def test_a_column_that_is_no_array_is_refused(tmp_path: Path, values: list[object]) -> None:
    write_parquet(tmp_path / "train.parquet", x=values, y=[0, 1, 0])
    with pytest.raises(FedsimError, match=r"cannot become an array|dtype object"):
        load(str(tmp_path), columns="x=x,y=y")


def test_images_of_several_sizes_and_broken_ones_are_refused(tmp_path: Path) -> None:
    for broken in (b"", b"no image", image(0)["bytes"][:40]):
        images = [image(1), {"bytes": broken, "path": ""}]
        write_parquet(tmp_path / "train.parquet", x=images, y=[0, 1])
        with pytest.raises(FedsimError, match="cannot become an array"):
            load(str(tmp_path), columns="x=x,y=y")


def test_what_the_hub_would_have_is_named_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(FedsimError) as error:
        load("hf:flwrlabs/femnist", directory=tmp_path, columns="x=image,y=label")
    assert (
        f"fetch it: hf download flwrlabs/femnist --repo-type dataset --revision "
        f"refs/convert/parquet --local-dir {tmp_path}/flwrlabs/femnist" in str(error.value)
    )
    for name in ("hf:femnist", "hf:", "hf:../x", "hf:a/b/c", "hf:a/.."):
        with pytest.raises(FedsimError, match="it must be hf:owner/name"):
            load(name, directory=tmp_path)


def test_a_config_takes_a_name_of_the_hub_and_the_keys_of_files() -> None:
    config = RunConfig.parse(
        {"data": {"name": "hf:flwrlabs/femnist", "columns": "x=a,y=b", "classes": 62}}
    )
    assert RunConfig.parse(config.to_tree()) == config
    assert modules_in_config(config) == []


def test_columns_that_a_plus_joins_are_several_inputs_by_name(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "train.parquet",
        input_ids=[[k, 3] for k in range(10)],
        attention_mask=[[1, k % 2] for k in range(10)],
        label=[k % 2 for k in range(10)],
    )
    data = load(str(tmp_path), columns="x=input_ids + attention_mask,y=label")
    assert isinstance(data.train.x, NamedTensors)
    assert data.input_shape == {"attention_mask": (2,), "input_ids": (2,)}
    assert data.test.x["input_ids"].tolist() == [[4, 3], [9, 3]]
    assert data.vocabulary == {"attention_mask": 2, "input_ids": 10}
    with pytest.raises(FedsimError, match="no column 'token_type_ids' in its split train"):
        load(str(tmp_path), columns="x=input_ids+token_type_ids,y=label")

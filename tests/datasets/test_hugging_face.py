"""Data sets of the `datasets` package, from local files; skipped where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedsim.datasets import load
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

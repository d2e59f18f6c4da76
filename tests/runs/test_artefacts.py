from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedsim.errors import FedsimError
from fedsim.runs.artefacts import RunDirectory


def test_a_directory_that_holds_a_run_is_refused_unless_it_may_be_overwritten(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.check_free(overwrite=False)
    assert not directory.path.exists()
    directory.claim("seed = 1\n")
    with pytest.raises(FedsimError, match="already holds a run"):
        directory.check_free(overwrite=False)
    directory.check_free(overwrite=True)


def test_claiming_removes_the_files_of_an_earlier_run_and_no_others(tmp_path: Path) -> None:
    for name in ("metrics.csv", "ledger.jsonl", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text("old")
    RunDirectory(tmp_path).claim("seed = 2\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "notes.txt"]
    assert (tmp_path / "config.toml").read_text() == "seed = 2\n"


def test_a_file_where_the_directory_should_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("")
    with pytest.raises(FedsimError, match="must be a directory"):
        RunDirectory(path).check_free(overwrite=True)


def test_metrics_gain_columns_without_losing_rows(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    rows = [{"round": 0, "loss": 2.5}, {"round": 1, "loss": 1.5, "asked": 3}, {"round": 2}]
    for row in rows:
        directory.add_row(row)
    with directory.metrics.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["round"] for row in read] == ["0", "1", "2"]
    assert [row["asked"] for row in read] == ["", "3", ""]
    assert [row["loss"] for row in read] == ["2.5", "1.5", ""]


def test_the_model_is_read_back_as_it_was(tmp_path: Path) -> None:
    arrays = {"w": torch.randn(3, 4).t(), "b": torch.arange(3)}
    directory = RunDirectory(tmp_path)
    directory.save_model(arrays)
    read = load_file(directory.model)
    assert all(torch.equal(read[name], arrays[name]) for name in arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]

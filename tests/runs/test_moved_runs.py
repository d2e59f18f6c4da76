"""A run's directory and its config stand for themselves: moved, and run again elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fedsim
from fedsim import RunConfig
from fedsim.engines import LocalGrid
from fedsim.runs import runner
from fedsim.runs.directory import RunDirectory

# An engine whose clients keep what is theirs in files of the run's directory.
CONFIG = RunConfig.parse(
    {
        "rounds": 4,
        "partition": {"clients": 6, "max-examples": 60},
        "client": {"name": "adadp-lr", "state": "client"},
        "checkpoint": {"every": 2},
        "engine": {"name": "simulation", "device": "cpu"},
    }
)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of Flower's runtime, which starts processes."""
    monkeypatch.setattr(
        runner,
        "resolve_name",
        lambda name: (
            lambda resolved, out, callbacks: runner.drive(
                resolved, LocalGrid(resolved.trainer), RunDirectory(out)
            )
        ),
    )


def files(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def test_a_config_that_is_run_again_leaves_the_first_runs_clients_alone(tmp_path: Path) -> None:
    fedsim.run(CONFIG, out=tmp_path / "first")
    first = files(tmp_path / "first")
    assert any(name.startswith("clients/") for name in first)
    assert str(tmp_path) not in first["config.toml"].decode()
    again = RunConfig.load(tmp_path / "first" / "config.toml")
    fedsim.run(again, out=tmp_path / "again")
    assert files(tmp_path / "first") == first
    model = RunDirectory(tmp_path / "again").model.read_bytes()
    assert model == first["model.safetensors"]


def test_a_directory_that_was_moved_goes_on_with_what_its_clients_kept(tmp_path: Path) -> None:
    fedsim.run(CONFIG.replace(rounds=8), out=tmp_path / "whole")
    fedsim.run(CONFIG, out=tmp_path / "old")
    shutil.move(tmp_path / "old", tmp_path / "new")
    fedsim.run(CONFIG.replace(rounds=8), out=tmp_path / "new", resume=True)
    assert not (tmp_path / "old").exists()
    whole, moved = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "new")
    assert moved.model.read_bytes() == whole.model.read_bytes()
    assert moved.metrics_file.rows()[-1]["train-fresh-state"] == 0.0

"""A run that goes on from another directory takes no other file of the same relative name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError
from fedsim.runs.directory import NAMED_FILES
from fedsim.runs.sweep import grid_runs, run_sweep

CONFIG = RunConfig.parse(
    {
        "rounds": 2,
        "data": {"name": "people.npz", "classes": 3},
        "partition": {"clients": 3},
        "engine": {"device": "cpu"},
    }
)


def people(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(30, 4)).astype(np.float32), rng.integers(0, 3, 30)
    np.savez(folder / "people.npz", x_train=x, y_train=y, x_test=x, y_test=y)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that began in ``mine``, where one goes on from ``other``."""
    people(tmp_path / "mine", 1)
    people(tmp_path / "other", 2)
    monkeypatch.chdir(tmp_path / "mine")
    fedsim.run(CONFIG, out=tmp_path / "run")
    monkeypatch.chdir(tmp_path / "other")
    return tmp_path / "run"


def resumed(run: Path, **changes: Any) -> fedsim.runs.record.RunResult:
    config = RunConfig.load(run / "config.toml").replace(rounds=4, **changes)
    return fedsim.run(config, out=run, resume=True)


def test_another_file_of_the_name_is_refused_and_the_runs_own_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = r"data.name = 'people.npz'; .*other/people.npz, another file, is here, and .*mine/people"
    with pytest.raises(FedsimError, match=said):
        resumed(run)
    with pytest.raises(FedsimError, match=rf"{said}.*; continue in .*mine\.$"):
        fedsim.load(run).evaluate()
    fedsim.load(run).evaluate("people.npz")  # which is what is asked for
    Path("people.npz").unlink()
    with pytest.raises(FedsimError, match=r"no such file is here, and the run in .*mine/people"):
        resumed(run)
    monkeypatch.chdir("../mine")
    fedsim.load(run).evaluate()
    assert len(resumed(run).metrics) == 5
    assert "mine" not in (run / "config.toml").read_text()


def test_a_file_that_is_gone_does_not_keep_a_run_that_was_moved(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy("../mine/people.npz", "people.npz")
    shutil.rmtree("../mine")
    resumed(run)
    assert "other/people.npz here; " in caplog.text
    assert "mine/people.npz, with which the run in" in caplog.text


def test_a_run_that_begins_anew_notes_its_own_file_and_one_without_files_none(run: Path) -> None:
    fedsim.run(CONFIG, out=run, overwrite=True)
    assert "other/people.npz" in (run / NAMED_FILES).read_text()
    fedsim.load(run).evaluate()
    fedsim.run(
        CONFIG.replace(**{"data.classes": "", "data.name": "digits"}), out=run, overwrite=True
    )
    assert not (run / NAMED_FILES).exists()
    fedsim.run(CONFIG.replace(**{"data.name": str(Path("people.npz").absolute())}), out="absolute")
    assert not Path("absolute", NAMED_FILES).exists()


def test_a_member_of_a_sweep_notes_its_files_too(run: Path) -> None:
    run_sweep(grid_runs(CONFIG, {"client.lr": [0.1]}), Path("sweep"))
    (note,) = Path("sweep").glob(f"*/{NAMED_FILES}")
    assert "other/people.npz" in note.read_text()


def test_a_note_that_is_damaged_is_refused(run: Path) -> None:
    (run / NAMED_FILES).write_text("{}")
    with pytest.raises(FedsimError, match=r"named-files\.json is damaged"):
        resumed(run)


def test_a_key_of_a_note_that_the_config_lacks_is_ignored(run: Path) -> None:
    note = json.loads((run / NAMED_FILES).read_text())
    note["files"] = {"partition.counts": "../mine/people.npz"}
    (run / NAMED_FILES).write_text(json.dumps(note))
    resumed(run)

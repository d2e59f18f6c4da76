from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsim.cli.app import app

ROOT = Path(__file__).parent.parent.parent


def fedsim(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "from fedsim.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "100"},
        check=False,
    )


SMALL = """
name = "small"
rounds = 2
[partition]
clients = 40
[cohort]
name = "poisson"
rate = 0.2
[mechanism]
name = "clipping"
[noise]
target-epsilon = 2.0
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_run_trains_and_says_what_it_reached(config: Path, tmp_path: Path) -> None:
    done = fedsim("run", "small.toml", "--set", "client.lr=0.2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "add-remove" in done.stdout
    assert "runs/small/model.safetensors" in done.stdout
    assert "lr = 0.2" in (tmp_path / "runs" / "small" / "config.toml").read_text()
    again = fedsim("run", "small.toml", cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert fedsim("run", "small.toml", "--overwrite", "--seed", "3", cwd=tmp_path).returncode == 0
    assert "seed = 3" in (tmp_path / "runs" / "small" / "config.toml").read_text()


def test_a_mistake_is_one_sentence_and_status_2_and_writes_nothing(
    config: Path, tmp_path: Path
) -> None:
    done = fedsim("run", "small.toml", "--set", "cohort.rate=2.0", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "fedsim: cohort.rate = 2.0; it must be at most 1.0."
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.toml"]


def test_help_teaches_with_an_example(tmp_path: Path) -> None:
    done = fedsim("run", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "target-epsilon" in done.stdout


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run", "The TOML file that describes the run."),
        ("privacy", "a ledger (ledger.jsonl)"),
        ("experiment", "a directory with an experiment.toml."),
        ("deploy init", "The federation's directory."),
        ("deploy up", "The federation's directory."),
    ],
)
def test_help_says_what_the_argument_is(command: str, says: str) -> None:
    told = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "150"})
    assert told.exit_code == 0
    assert says in told.output

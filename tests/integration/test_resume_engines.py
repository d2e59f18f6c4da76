"""A run that was killed on one engine and goes on upon another ends with the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fedsim
from fedsim import RunConfig
from fedsim.runs.directory import RunDirectory

ROOT = Path(__file__).parent.parent.parent
CONFIG = RunConfig.parse(
    {
        "name": "moving",
        "rounds": 5,
        "partition": {"clients": 4, "max-examples": 40},
        "client": {"name": "adadp-lr", "state": "client", "batch-size": 10},
        "mechanism": {"name": "normalization"},
        "noise": {"multiplier": 1.0, "entropy": "config"},
        "checkpoint": {"every": 2},
        "engine": {"device": "cpu"},
    }
)
KILLED = """
import os, signal, sys
from fedsim.runs.metrics import MetricsFile
append = MetricsFile.append
def then_die(self, row):
    if row["round"] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, row)
MetricsFile.append = then_die
from fedsim.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "simulation", "deployment"])
def test_a_run_that_was_killed_locally_goes_on_upon_another_engine(engine, tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG.to_toml())
    command = [sys.executable, "-c", KILLED, "run", "c.toml", "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    died = subprocess.run(command, cwd=tmp_path, env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    moved = CONFIG.replace(**{"engine.name": engine})
    fedsim.run(moved, out=tmp_path / "run", resume=True)
    fedsim.run(CONFIG, out=tmp_path / "whole")
    resumed, whole = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "whole")
    assert resumed.model.read_bytes() == whole.model.read_bytes()
    assert [row["epsilon"] for row in resumed.metrics_file.rows()[1:]] == (
        [row["epsilon"] for row in whole.metrics_file.rows()[1:]]
    )

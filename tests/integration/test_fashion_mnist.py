"""Real data through the command line: skipped, saying so, where it is not there."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DATA = Path(os.environ.get("FEDSIM_DATA", ROOT / "data"))

CONFIG = f"""
name = "fashion"
rounds = 15
[data]
name = "fashion-mnist"
dir = "{DATA.absolute()}"
[partition]
name = "shards"
shards = 5
clients = 1000
[client]
lr = 0.1
batch-size = 0
epochs = 5
[cohort]
name = "poisson"
rate = 0.1
[mechanism]
name = "clipping"
clip-norm = 1.0
[noise]
target-epsilon = 5.0
[evaluate]
every = 5
"""


@pytest.mark.skipif(
    not any((DATA / f"fashion{mark}mnist.npz").exists() for mark in "-_"),
    reason=f"Fashion-MNIST is not in {DATA} (set FEDSIM_DATA to where fashion_mnist.npz is)",
)
def test_softmax_regression_learns_fashion_mnist_privately(tmp_path: Path) -> None:
    (tmp_path / "fashion.toml").write_text(CONFIG)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from fedsim.cli import main; main()",
            "run",
            "fashion.toml",
            "--out",
            "run",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # Without privacy this model ends near 0.80 after 100 rounds.
    assert float(rows[-1]["test-accuracy"]) > 0.6
    assert 4.8 < float(rows[-1]["epsilon"]) <= 5.0

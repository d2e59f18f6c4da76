"""Buffered rounds over SuperNodes of which one is frozen in mid-run, with privacy and without."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedsim import RunConfig
from fedsim.cli import main
from fedsim.deploy.bundle import write_app
from fedsim.deploy.rehearsal import Rehearsal
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import tensors
from fedsim.federation.buffered.schedule import LATENESS
from fedsim.privacy import Ledger
from fedsim.privacy.losses import gaussian_epsilon
from fedsim.runs.directory import RUNS, RunDirectory
from fedsim.runs.resolve import resolve
from fedsim.runs.runner import drive

NODES, FROZEN = 4, 3
CONFIG = RunConfig.parse(
    {
        "rounds": 6,
        "seed": 2,
        "partition": {"clients": NODES, "max-examples": 60},
        "client": {"steps": 3},
        "cohort": {"name": "buffered", "concurrency": 4, "buffer": 2, "participations": 5},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 2.0, "entropy": "config"},
        # Long enough for a busy machine: nobody else is late.
        "devices": {"duration": 25.0},
        "evaluate": {"every": 0},
        "engine": {"device": "cpu", "name": "deployment"},
    }
)
AS_THEY_COME: dict[str, Any] = {
    "name": "as-they-come",
    "mechanism.name": "none",
    "mechanism.weighting": "uniform",
    "noise.multiplier": "",
    "devices.duration": 0.0,
    "cohort.participations": 8,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def rehearsal(runs: Path) -> Iterator[Rehearsal]:
    with Rehearsal.temporary(NODES, variables={RUNS: str(runs)}) as made:
        made.start_all()
        yield made


def run_with_a_frozen_node(rehearsal: Rehearsal, config: RunConfig, runs: Path) -> RunDirectory:
    """Run a config; a node is frozen from the third release to the end of the run."""
    run_id = rehearsal.operator.submit(write_app(runs / config.name / "app", config.to_tree()))
    directory = RunDirectory(runs / f"{config.name}-{run_id}")
    node = rehearsal.running[f"supernode-{FROZEN}"].pid
    is_frozen, deadline = False, time.monotonic() + 400

    def poll() -> None:
        nonlocal is_frozen
        rehearsal.check()
        assert time.monotonic() < deadline, rehearsal.operator.log(run_id)
        if not is_frozen and directory.metrics.is_file():
            is_frozen = len(directory.metrics_file.rows()) >= 3
            if is_frozen:
                os.killpg(node, signal.SIGSTOP)

    try:
        status = rehearsal.operator.follow(run_id, poll)
    finally:
        os.killpg(node, signal.SIGCONT)
    assert status == "finished:completed", rehearsal.operator.log(run_id)
    assert is_frozen
    return directory


@pytest.mark.slow
def test_a_private_run_releases_zeros_in_a_frozen_nodes_places(
    rehearsal: Rehearsal, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with_a_frozen_node(rehearsal, CONFIG, runs)
    rows = run.metrics_file.rows()[-6:]
    schedule = resolve(CONFIG.replace(**{"engine.name": "local"})).devices.schedule
    assert schedule is not None
    of_frozen = schedule.client_ids == FROZEN
    missing = {int(row["round"]) for row in rows if row["usable"] < 2}
    assert missing
    assert missing <= {*schedule.releases[of_frozen].tolist()}
    assert min(missing) >= 2
    # The model is that of a run in this process, in which that client drops out of these releases.
    lost = {*schedule.versions[of_frozen & np.isin(schedule.releases, list(missing))].tolist()}
    resolved = resolve(CONFIG.replace(**{"engine.name": "local"}))
    resolved.devices.replying = lambda number, ids: ~((ids == FROZEN) & (number - 1 in lost))
    local = drive(resolved, LocalGrid(resolved.trainer))
    found = resolved.trainer.layout.flatten(load_file(run.model))
    assert torch.equal(found, resolved.trainer.layout.flatten(tensors(local.arrays)))
    # Ledger, epsilon and statement are those of the whole plan, whoever was there.
    ledger = Ledger.read(run.ledger)
    assert [entry.event.count for entry in ledger.entries] == [1, *[0] * 5]
    assert ledger.heads[-1] == local.ledgers.server.heads[-1]
    assert rows[-1]["epsilon"] == pytest.approx(gaussian_epsilon(5**0.5 / 2, 1e-5), rel=1e-6)
    for command in ("verify", "privacy"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(run.path)])
        assert not ended.value.code
    shown = " ".join(capsys.readouterr().out.split())
    assert LATENESS in shown


@pytest.mark.slow
def test_without_privacy_the_others_fill_the_buffer(rehearsal: Rehearsal, runs: Path) -> None:
    run = run_with_a_frozen_node(rehearsal, CONFIG.replace(**AS_THEY_COME), runs)
    rows = run.metrics_file.rows()
    assert [row["round"] for row in rows[-6:]] == [*range(1, 7)]
    assert all(row["asked"] == 2 for row in rows[-6:])
    assert sum(row["usable"] for row in rows[-6:]) >= 11

"""A scheduler that sends SIGTERM finds the model and the checkpoint saved before anything else."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim import RunConfig
from fedsim.runs import drive
from fedsim.runs.artefacts import RunDirectory

CONFIG = RunConfig.parse(
    {
        "rounds": 9,
        "partition": {"clients": 6, "max-examples": 60},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0},
        "checkpoint": {"every": 100},
        "engine": {"device": "cpu"},
    }
)


class Terminated(fedsim.Callback):
    """Sends this process SIGTERM in the middle of the second round."""

    def on_round(self, status: fedsim.RunStatus) -> None:
        if status.round == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_model_and_checkpoint_are_saved_as_soon_as_the_round_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, order = RunDirectory(tmp_path / "run"), []
    leave_report = drive.leave_report

    def noted(*arguments: Any) -> None:
        state = directory.checkpoints.newest()
        order.append((directory.model.exists(), None if state is None else state.round))
        leave_report(*arguments)

    monkeypatch.setattr(drive, "leave_report", noted)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        result = fedsim.run(CONFIG, out=directory.path, callbacks=[Terminated()])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (result.ended, result.metrics[-1]["round"]) == ("interrupted", 2)
    assert order == [(True, 2)]  # the report, which takes its time, comes after both
    resumed = fedsim.run(CONFIG, out=directory.path, resume=True)
    whole = fedsim.run(CONFIG, out=tmp_path / "whole")
    assert directory.model.read_bytes() == RunDirectory(tmp_path / "whole").model.read_bytes()
    assert [row["round"] for row in resumed.metrics] == [row["round"] for row in whole.metrics]

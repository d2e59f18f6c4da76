"""Sweeps that were killed or interrupted, and are continued by starting them again."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_runs import Killed, killed_in

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.runs import session
from fedsim.runs.directory import RunDirectory
from fedsim.runs.run_ledgers import read_summary
from fedsim.runs.sweep import grid_runs, run_sweep

BASE = RunConfig().replace(
    **{
        "rounds": 4,
        "partition.clients": 30,
        "cohort.name": "poisson",
        "cohort.rate": 0.4,
        "mechanism.name": "clipping",
        "noise.multiplier": 1.0,
        "client.lr": 0.5,
        "client.batch-size": 5,
    }
)
RATES = {"client.lr": [0.1, 0.5]}


def test_rounds_of_a_sweep_that_was_killed_before_any_checkpoint_are_charged_once(
    tmp_path: Path,
) -> None:
    grid = grid_runs(BASE.replace(**{"checkpoint.every": 10}), RATES)
    with killed_in(3):
        run_sweep(grid, tmp_path / "sweep")
    run_sweep(grid, tmp_path / "sweep")
    for member in grid:
        fedsim.run(member.config, out=tmp_path / member.label)
        continued, alone = (
            RunDirectory(place / member.label) for place in (tmp_path / "sweep", tmp_path)
        )
        assert Ledger.read(continued.ledger).heads == Ledger.read(alone.ledger).heads
        spent, expected = (
            [row.get("epsilon") for row in directory.metrics_file.rows()]
            for directory in (continued, alone)
        )
        assert spent == expected


@pytest.mark.parametrize(
    ("owner", "name"), [(RunDirectory, "write_manifest"), (session, "write_report")]
)
def test_files_that_a_killed_sweep_had_no_time_to_write_are_written_when_it_is_continued(
    owner: object,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = grid_runs(BASE.replace(**{"data.validation": 0.1, "checkpoint.every": 1}), RATES)
    outcomes = run_sweep(grid, tmp_path / "whole")

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            run_sweep(grid, tmp_path / "killed")
    assert run_sweep(grid, tmp_path / "killed") == outcomes
    for member in grid:
        whole, continued = (tmp_path / place / member.label for place in ("whole", "killed"))
        files = {path.name for path in whole.iterdir()}
        assert files == {path.name for path in continued.iterdir()}
        assert files >= {"manifest.json", "summary.json", "report.html"}
        whole_summary, summary = (read_summary(run / "summary.json") for run in (whole, continued))
        assert summary.keys() == whole_summary.keys()


def test_a_sweep_is_not_continued_with_noise_from_elsewhere(tmp_path: Path) -> None:
    run_sweep(grid_runs(BASE, RATES), tmp_path)
    run_sweep(grid_runs(BASE.replace(**{"noise.entropy": "config"}), RATES), tmp_path)
    with pytest.raises(FedsimError, match="run of another config"):
        run_sweep(grid_runs(BASE.replace(**{"noise.entropy": "system"}), RATES), tmp_path)

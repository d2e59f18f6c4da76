"""A ServerApp that is started again goes on with the run that the one before has left."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedsim import RunConfig
from fedsim.apps import server_app
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.runs.directory import OUT, RUNS, RunDirectory, latest_run
from fedsim.runs.resolve import resolve
from fedsim.runs.run_ledgers import RunOutcome

CONFIG = RunConfig.parse(
    {
        "name": "served",
        "rounds": 4,
        "partition": {"clients": 4, "max-examples": 40},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0, "entropy": "config"},
        "checkpoint": {"every": 1},
        "engine": {"device": "cpu", "name": "simulation"},
    }
)


def serve(config: RunConfig, run_id: int) -> None:
    grid = LocalGrid(resolve(config).trainer)
    context = Context(
        run_id=run_id,
        node_id=1,
        node_config={},
        state=RecordDict(),
        run_config=dict(config.to_run_config()),
    )
    server_app.app(grid, context)


def test_the_last_run_of_the_name_goes_on_in_its_directory(tmp_path: Path, monkeypatch):
    monkeypatch.delenv(OUT, raising=False)
    monkeypatch.setenv(RUNS, str(tmp_path))
    serve(CONFIG.replace(rounds=2), 11)
    serve(CONFIG.replace(**{"checkpoint.resume": True}), 12)
    assert [path.name for path in tmp_path.iterdir()] == ["served-11"]
    assert [row["round"] for row in RunDirectory(tmp_path / "served-11").metrics_file.rows()] == [
        0,
        1,
        2,
        3,
        4,
    ]
    serve(CONFIG, 13)
    whole, resumed = (RunDirectory(tmp_path / f"served-{run}") for run in (13, 11))
    assert resumed.model.read_bytes() == whole.model.read_bytes()
    with pytest.raises(FedsimError, match=r"client\.lr"):
        serve(CONFIG.replace(**{"checkpoint.resume": True, "client.lr": 9.0}), 14)


def test_a_run_that_is_still_written_to_is_not_taken_up(tmp_path: Path):
    directory = RunDirectory(tmp_path / "served-1")
    with directory.claim("name = 'x'\n"), pytest.raises(FedsimError, match="another run is"):
        latest_run(tmp_path, "served")


def test_a_request_in_its_directory_stops_a_run_after_a_round(tmp_path: Path, monkeypatch):
    """The submitter's callback decided it by what was released: the whole plan is charged."""
    monkeypatch.delenv(OUT, raising=False)
    monkeypatch.setenv(RUNS, str(tmp_path))
    directory = RunDirectory(tmp_path / "served-21")

    class Impatient(server_app._Log):
        def on_round(self, status):
            if status.round == 2:
                directory.stop_request(21).write_text("enough")

    monkeypatch.setattr(server_app, "_Log", Impatient)
    serve(CONFIG, 21)
    assert directory.metrics_file.rows()[-1]["round"] == 2
    assert RunOutcome.read(directory.path) == ("stopped", "Stopped early: enough.")
    entries = Ledger.read(directory.ledger).entries
    charged = [(entry.round, entry.through, entry.event.count) for entry in entries]
    assert charged == [(1, None, 1), (2, None, 1), (2, 4, 2)]

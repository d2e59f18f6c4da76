"""A plain Flower app with our strategy, in all of Flower's runtimes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedsim.deploy.rehearsal import Rehearsal
from fedsim.deploy.simulation import Simulation, resources
from fedsim.engines import LocalGrid
from fedsim.privacy import epsilon

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"
CONFIG = {"num-server-rounds": 5, "population": 4, "noise-multiplier": 0.3}


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def check(path: Path, rounds: int) -> None:
    from fedsim.cohorts import FullCohort

    found = json.loads(path.read_text())
    assert set(found["dtypes"].values()) == {"float64"}
    assert sorted(map(int, found["accuracy"])) == list(range(1, rounds + 1))
    assert found["accuracy"][str(rounds)] > 0.85
    expected = epsilon(
        noise_multiplier=0.3, cohort=FullCohort(population=4), rounds=rounds, delta=1e-5
    )
    assert found["epsilon"] == pytest.approx(expected)


def test_it_runs_in_one_process(tmp_path, monkeypatch):
    client = load("numpy_app.client_app", monkeypatch).app
    server = load("numpy_app.server_app", monkeypatch).app
    out = tmp_path / "summary.json"
    config = {**CONFIG, "out": str(out)}
    grid = LocalGrid(client, num_nodes=4, run_config=config)
    server(grid, Context(1, 0, {}, RecordDict(), config))
    check(out, 5)


@pytest.mark.slow
def test_it_runs_as_virtual_clients(tmp_path):
    out = tmp_path / "summary.json"
    with Simulation() as simulation:
        run_id = simulation.operator.submit(
            PLUGIN, federation_config=resources(4, 1, 0), run_config=f'out="{out}"'
        )
        assert simulation.operator.follow(run_id) == "finished:completed", simulation.operator.log(
            run_id
        )
    check(out, 5)


@pytest.mark.slow
def test_it_runs_as_networked_processes(tmp_path):
    out = tmp_path / "summary.json"
    with Rehearsal.temporary(4) as rehearsal:
        rehearsal.start_all()
        run_id = rehearsal.operator.submit(PLUGIN, run_config=f'out="{out}" num-server-rounds=3')
        status = rehearsal.operator.follow(run_id, alive=rehearsal.tend)
        assert status == "finished:completed", rehearsal.operator.log(run_id)
    check(out, 3)

"""Each fault of each choice of clients, in a round of its own: every engine gives what local gives.

The app's trainer, model and strategy are real; the model fails by schedule, so that one run on
each engine goes through the whole table.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedsim.deploy.bundle import write_app
from fedsim.deploy.rehearsal import Rehearsal, Simulation, federation_config
from fedsim.deploy.services import Node
from fedsim.engines import LocalGrid, RayGrid

APP = Path(__file__).with_name("treacherous_app")
APPS = ("treacherous.server_app:app", "treacherous.client_app:app")
CLIENTS = 7
WHO = {"one": (2,), "several": (0, 2, 5), "all": (0, 1, 2, 3, 4, 5)}
FAULTS = ("raises", "exits", "nan", "inf", "shape", "width")
SCHEDULE = [("raises", ()), *((fault, who) for fault in FAULTS for who in WHO.values())]
TASK_SECONDS = 20.0


def as_setting(schedule) -> str:
    return ",".join(f"{fault}:{'.'.join(map(str, who))}" for fault, who in schedule)


def run(grid, schedule, out: Path) -> list:
    config = {"schedule": as_setting(schedule), "out": str(out)}
    importlib.import_module("treacherous.server_app").app(
        grid, Context(1, 0, {}, RecordDict(), config)
    )
    return rows_of(out)


def rows_of(out: Path) -> list:
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _app_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(APP))


def expected(schedule, directory: Path) -> list:
    """What local gives when the same clients merely raise: their number, and the model's bytes."""
    trainer = importlib.import_module("treacherous.trainer").trainer_for
    quiet = [("raises", who) for _, who in schedule]
    rows = run(LocalGrid(trainer(as_setting(quiet))), quiet, directory / "expected")
    counts = [(CLIENTS, CLIENTS - len(who), len(who)) for _, who in schedule]
    assert [tuple(row[:3]) for row in rows] == counts
    assert len({row[3] for row in rows}) == len(schedule)
    return rows


@pytest.mark.parametrize("block_size", [0, 1, 3])
def test_local_in_blocks_of_any_size(tmp_path, block_size):
    wanted = expected(SCHEDULE, tmp_path)
    trainer_for = importlib.import_module("treacherous.trainer").trainer_for
    assert (
        run(LocalGrid(trainer_for(as_setting(SCHEDULE), block_size)), SCHEDULE, tmp_path / "rows")
        == wanted
    )


@pytest.mark.slow
def test_local_by_messages_and_clients_that_hang(tmp_path):
    app = importlib.import_module("treacherous.client_app").app
    schedule = [*SCHEDULE, ("hangs", (4,)), ("raises", ())]
    config = {"schedule": as_setting(schedule), "seconds": 5.0}
    grid = LocalGrid(app, num_nodes=CLIENTS, run_config=config)
    assert run(grid, schedule, tmp_path / "rows") == expected(schedule, tmp_path)


@pytest.mark.slow
def test_processes_of_this_machine_and_those_that_are_killed(tmp_path):
    trainer_for = importlib.import_module("treacherous.trainer").trainer_for
    schedule = [*SCHEDULE, ("dies", (2,)), ("dies", (1, 4)), ("raises", ())]
    with LocalGrid(trainer_for(as_setting(schedule)), workers=2) as grid:
        assert run(grid, schedule, tmp_path / "rows") == expected(schedule, tmp_path)


@pytest.mark.slow
def test_ray_and_workers_that_are_killed_or_hang(tmp_path):
    import ray.cloudpickle as cloudpickle

    module = importlib.import_module("treacherous.trainer")
    cloudpickle.register_pickle_by_value(module)
    schedule = [*SCHEDULE, ("dies", (2,)), ("dies", (1, 4)), ("raises", ())]
    with RayGrid(
        module.trainer_for(as_setting(schedule)), workers=2, cpus_per_worker=0.1, retries=1
    ) as grid:
        assert run(grid, schedule, tmp_path / "rows") == expected(schedule, tmp_path)


@pytest.mark.slow
def test_flowers_simulation_and_clients_that_hang_or_die(tmp_path):
    schedule = [*SCHEDULE, ("hangs", (4,)), ("hangs", (1, 2)), ("dies", (2,)), ("dies", (1, 4))]
    schedule.append(("raises", ()))
    out = tmp_path / "rows"
    with Simulation({"PYTHONPATH": os.pathsep.join([str(APP), *python_path()])}) as simulation:
        run_id = simulation.operator.submit(
            APP,
            federation_config=federation_config(CLIENTS, 1, 0),
            run_config=f'out="{out}" schedule="{as_setting(schedule)}" seconds={TASK_SECONDS}',
        )
        status = simulation.operator.follow(run_id)
        assert status == "finished:completed", simulation.operator.log(run_id)
    assert rows_of(out) == expected(schedule, tmp_path)


def python_path() -> list[str]:
    return [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []


@pytest.mark.slow
def test_a_deployment_and_clients_that_hang_or_are_killed(tmp_path, monkeypatch):
    schedule = [*SCHEDULE, ("hangs", (4,)), ("dies", (2,))]
    out = tmp_path / "rows"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(APP), *python_path()]))
    with Rehearsal.temporary(CLIENTS, apps=APPS) as rehearsal:
        for node in range(CLIENTS):
            party = Node.load(rehearsal.federation.node(node))
            replace(party, task_seconds=TASK_SECONDS).save()
        rehearsal.start_all()
        server, client = APPS
        config = {"out": str(out), "schedule": as_setting(schedule)}
        app = write_app(tmp_path / "app", config, server_app=server, client_app=client)
        run_id = rehearsal.operator.submit(app)
        status = rehearsal.operator.follow(run_id, rehearsal.check)
        assert status == "finished:completed", rehearsal.operator.log(run_id)
    assert rows_of(out) == expected(schedule, tmp_path)

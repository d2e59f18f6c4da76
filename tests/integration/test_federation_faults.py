"""What goes wrong in a federation, and what is left of a run when it does."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedsim.deploy.bundle import CLIENT_APP, write_app
from fedsim.deploy.rehearsal import Rehearsal
from fedsim.deploy.services import Node
from fedsim.engines import LocalGrid

APP = Path(__file__).with_name("faulty_app")
APPS = ("faulty.server_app:app", "faulty.client_app:app")
TASK_SECONDS = 25.0
EVERY_FAULT = "1=raise,2=nan,3=shape,4=keys,5=garbage"


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def releases(out: Path) -> int:
    lines = out.with_suffix(".ledger").read_text().splitlines()
    entries = [json.loads(line)["entry"].get("releases", []) for line in lines]
    return sum(release["kind"] == "release" for of_line in entries for release in of_line)


def counts(row: dict) -> tuple[int, int, int]:
    return row["asked"], row["usable"], row["failed"]


def wait(condition, limit: float, rehearsal: Rehearsal | None = None) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, rehearsal and rehearsal.running["superlink"].tail(40)
        time.sleep(0.2)


def test_clients_that_misbehave_contribute_nothing_and_are_counted(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    client, server = (
        importlib.import_module(f"faulty.{name}").app for name in ("client_app", "server_app")
    )
    out = tmp_path / "rows"
    config = {
        "rounds": 2,
        "population": 6,
        "timeout": 60.0,
        "faults": EVERY_FAULT,
        "noise": 1e-6,
        "out": str(out),
    }
    grid = LocalGrid(client, num_nodes=6, run_config=config)
    server(grid, Context(1, 0, {}, RecordDict(), config))
    first, second = rows_of(out)
    assert counts(first) == counts(second) == (6, 1, 5)
    # Client 0 alone moves the model towards 1, by a sixth of the way: the denominator is the
    # declared population.
    assert first["w"] == pytest.approx([1 / 6] * 3, abs=1e-3)
    assert releases(out) == 2


@pytest.fixture(scope="module")
def rehearsal():
    # Installed everywhere, as an app must be that nodes run.
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(APP), prepend=os.pathsep)
    with Rehearsal.temporary(6, apps=APPS) as made:
        made.register()
        for node in range(6):
            party = Node.load(made.federation.node(node))
            replace(party, task_seconds=TASK_SECONDS).save()
            made.start_node(node)
        yield made
    patch.undo()


@pytest.fixture
def submit(rehearsal, tmp_path):
    def go(rounds=2, population=6, timeout=40.0, faults="", apps=APPS):
        out = tmp_path / "rows"
        config = {
            "rounds": rounds,
            "population": population,
            "timeout": timeout,
            "faults": faults,
            "noise": 1e-6,
            "out": str(out),
        }
        server, client = apps
        app = write_app(tmp_path / "app", config, server_app=server, client_app=client)
        return rehearsal.operator.submit(app), out

    return go


def finish(rehearsal, run_id, limit=240.0, poll=None):
    deadline = time.monotonic() + limit

    def in_time():
        (poll or rehearsal.check)()
        assert time.monotonic() < deadline, rehearsal.operator.log(run_id)

    status = rehearsal.operator.follow(run_id, in_time)
    assert status == "finished:completed", rehearsal.operator.log(run_id)


@pytest.mark.slow
def test_so_they_do_over_the_network(rehearsal, submit):
    run_id, out = submit(faults=EVERY_FAULT)
    finish(rehearsal, run_id)
    assert [counts(row) for row in rows_of(out)] == [(6, 1, 5)] * 2
    assert releases(out) == 2


@pytest.mark.slow
def test_a_client_that_hangs_is_ended_by_its_node_and_takes_part_in_the_next_round(
    rehearsal, submit
):
    run_id, out = submit(faults="1=hang@1", timeout=120.0)
    finish(rehearsal, run_id)
    assert [counts(row) for row in rows_of(out)] == [(6, 5, 1), (6, 6, 0)]
    assert f"ends a task after {TASK_SECONDS:g} s" in rehearsal.operator.log(run_id)


@pytest.mark.slow
def test_a_client_whose_process_dies_has_failed_and_takes_part_in_the_next_round(rehearsal, submit):
    # Without a node that says so, each round would wait for this timeout.
    run_id, out = submit(faults="2=die@1", timeout=3000.0)
    finish(rehearsal, run_id)
    assert [counts(row) for row in rows_of(out)] == [(6, 5, 1), (6, 6, 0)]
    assert rows_of(out)[0]["reasons"] == {"raised": 1}
    assert "process exited with status 9" in rehearsal.operator.log(run_id)
    assert releases(out) == 2


@pytest.mark.slow
def test_a_client_whose_process_is_killed_as_it_starts_has_failed_and_its_node_goes_on(
    rehearsal, submit
):
    run_id, out = submit(rounds=4, timeout=3000.0)
    kill_next_task(rehearsal.running["supernode-4-app"].pid)
    finish(rehearsal, run_id)
    # On a busy machine the task that is seen first may be that of a later round.
    assert sorted(counts(row) for row in rows_of(out)) == [(6, 5, 1), *[(6, 6, 0)] * 3]
    assert "process was ended by signal 9" in rehearsal.operator.log(run_id)
    assert releases(out) == 4


def kill_next_task(superexec: int) -> None:
    """Kill the next task of a SuperExec, which a child of it forks, before it has read anything."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for forker in children(superexec):
            for task in children(forker):
                os.kill(task, signal.SIGKILL)
                return
        time.sleep(0.0005)
    raise AssertionError("no task was started")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_node_refuses_a_bundle_for_an_app_that_it_does_not_run(rehearsal, submit):
    run_id, out = submit(rounds=1, apps=(APPS[0], CLIENT_APP))
    finish(rehearsal, run_id)
    assert counts(rows_of(out)[0]) == (6, 0, 6)
    assert "here only 'faulty.client_app:app' is run" in rehearsal.operator.log(run_id)


@pytest.mark.slow
def test_a_node_killed_in_mid_round_is_missed_and_taken_back_once_restarted(rehearsal, submit):
    run_id, out = submit(rounds=9, faults="3=slow@2,0=slow")
    wait(lambda: len(rows_of(out)) >= 1, 120, rehearsal)
    time.sleep(5)  # it is in the middle of its slow second round
    os.killpg(rehearsal.running["supernode-3"].pid, signal.SIGKILL)
    # Its place is kept until it has missed its heartbeats; whoever restarts it does so until then.
    finish(rehearsal, run_id, limit=500, poll=Restarts(rehearsal, 3))
    rows = rows_of(out)
    assert counts(rows[0]) == (6, 6, 0)
    assert counts(rows[1]) == (6, 5, 1)
    assert counts(rows[-1]) == (6, 6, 0)
    assert releases(out) == 9


class Restarts:
    """Restarts a node that has ended, five seconds later, as systemd does."""

    def __init__(self, rehearsal: Rehearsal, node: int) -> None:
        self.rehearsal, self.node = rehearsal, node
        self.due: float | None = None

    def __call__(self) -> None:
        if self.rehearsal.running[f"supernode-{self.node}"].alive():
            return
        self.due = self.due or time.monotonic() + 5
        if time.monotonic() >= self.due:
            self.due = None
            app = self.rehearsal.running[f"supernode-{self.node}-app"].pid
            with suppress(ProcessLookupError):
                os.killpg(app, signal.SIGKILL)
            self.rehearsal.start_node(self.node)

"""What goes wrong in a federation, and what is left of a run when it does."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedsim.deploy.rehearsal import Rehearsal
from fedsim.engines import LocalGrid

APP = Path(__file__).with_name("faulty_app")
EVERY_FAULT = "1=raise,2=nan,3=shape,4=keys,5=garbage"


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def releases(out: Path) -> int:
    lines = out.with_suffix(".ledger").read_text().splitlines()
    return sum(json.loads(line)["entry"]["kind"] == "release" for line in lines)


def counts(row: dict) -> tuple[int, int, int]:
    return row["asked"], row["usable"], row["failed"]


def wait(condition, limit: float, rehearsal: Rehearsal | None = None) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, rehearsal and rehearsal.superlink.tail(40)
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
        "noise": 1e-6,
        "faults": EVERY_FAULT,
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
    with Rehearsal.temporary(6, database=True) as made:
        made.register()
        for node in range(6):
            made.start_node(node)
        yield made


@pytest.fixture
def submit(rehearsal, tmp_path):
    def go(rounds=2, population=6, timeout=40.0, faults="", noise=1e-6):
        out = tmp_path / "rows"
        config = (
            f'rounds={rounds} population={population} timeout={timeout} faults="{faults}" '
            f'noise={noise} out="{out}"'
        )
        return rehearsal.operator.submit(APP, run_config=config), out

    return go


def finish(rehearsal, run_id, limit=240.0):
    deadline = time.monotonic() + limit

    def in_time():
        rehearsal.tend()
        assert time.monotonic() < deadline, rehearsal.operator.log(run_id)

    status = rehearsal.operator.follow(run_id, alive=in_time)
    assert status == "finished:completed", rehearsal.operator.log(run_id)


@pytest.mark.slow
def test_so_they_do_over_the_network(rehearsal, submit):
    run_id, out = submit(faults=EVERY_FAULT)
    finish(rehearsal, run_id)
    assert [counts(row) for row in rows_of(out)] == [(6, 1, 5)] * 2
    assert releases(out) == 2


@pytest.mark.slow
def test_a_client_that_never_answers_and_one_whose_process_dies_cost_one_timeout(rehearsal, submit):
    # A private run has no deadline that its clients share: it would wait for the one that hangs.
    run_id, out = submit(faults="1=hang@1,2=die@1", noise=0.0)
    finish(rehearsal, run_id)
    first, second = rows_of(out)
    assert counts(first) == (6, 4, 2)
    # The one that hangs is still at it: its node takes one message at a time.
    assert second["usable"] >= 4
    assert second["asked"] == 6
    assert releases(out) == 2
    # For those who come after: a node whose client hangs is restarted.
    restart(rehearsal, 1)


def restart(rehearsal, node):
    if rehearsal.supernodes[node].alive():
        rehearsal.stop(rehearsal.supernodes[node])
    rehearsal.start_node(node)


@pytest.mark.slow
def test_a_node_killed_in_mid_round_is_missed_and_taken_back(rehearsal, submit):
    run_id, out = submit(rounds=9, faults="3=slow@2,0=slow")
    wait(lambda: len(rows_of(out)) >= 1, 120, rehearsal)
    time.sleep(5)  # it is in the middle of its slow second round
    os.killpg(rehearsal.supernodes[3].pid, signal.SIGKILL)
    # Its place is kept until it has missed its heartbeats; then it gets in again.
    finish(rehearsal, run_id, limit=500)
    rows = rows_of(out)
    assert counts(rows[0]) == (6, 6, 0)
    assert counts(rows[1]) == (6, 5, 1)
    assert counts(rows[-1]) == (6, 6, 0)
    assert releases(out) == 9


@pytest.mark.slow
def test_a_superlink_that_is_killed_fails_the_run_and_serves_the_next(rehearsal, submit):
    run_id, out = submit(rounds=50, faults="0=slow")
    wait(lambda: len(rows_of(out)) >= 1, 120, rehearsal)
    os.killpg(rehearsal.superlink.pid, signal.SIGKILL)
    rehearsal.superlink.process.wait()
    charged = releases(out)
    rehearsal.start_superlink()
    # The ServerApp was its child; its ledger has every release that was made.
    assert charged >= len(rows_of(out))
    wait(lambda: rehearsal.operator.status(run_id).startswith("finished"), 120, rehearsal)
    assert rehearsal.operator.status(run_id) != "finished:completed"
    out.unlink()
    again, out = submit()
    finish(rehearsal, again)
    assert counts(rows_of(out)[-1]) == (6, 6, 0)

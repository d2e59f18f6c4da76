"""Nodes of a real federation that send replies again: none of them changes anybody's fate."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedsim.deploy import services
from fedsim.deploy.bundle import write_app
from fedsim.deploy.rehearsal import Rehearsal
from fedsim.engines import LocalGrid

pytestmark = pytest.mark.slow

APP = Path(__file__).with_name("faulty_app")
APPS = ("faulty.server_app:app", "faulty.client_app:app")
NODE = Path(__file__).with_name("replaying_node.py")
REPLAYS = {0: "twice", 1: "beside", 2: "instead"}
CLIENTS, ROUNDS = 5, 2


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def settings(out: Path, faults: str = "") -> dict:
    return {
        "rounds": ROUNDS,
        "population": CLIENTS,
        "timeout": 40.0,
        "faults": faults,
        "noise": 1e-6,
        "out": str(out),
    }


@pytest.fixture
def rehearsal(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(APP), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(APP))
    own_services = services.Node.services

    def replaying(self, *arguments, **options):
        node, app = own_services(self, *arguments, **options)
        if self.client in REPLAYS:
            python, _isolated, _module, _name, _supernode, *rest = node.command
            command = (python, str(NODE), REPLAYS[self.client], *rest)
            node = replace(node, command=command)
        return [node, app]

    monkeypatch.setattr(services.Node, "services", replaying)
    with Rehearsal.temporary(CLIENTS, apps=APPS) as made:
        made.start_all()
        yield made


def replays(rehearsal, node: int) -> list[str]:
    running = rehearsal.running[f"supernode-{node}"]
    lines = running.log.read_text(errors="replace").splitlines()
    return [line.split()[1] for line in lines if line.startswith("replayed ")]


def test_replies_that_are_sent_again_count_once_or_not_at_all(rehearsal, tmp_path):
    """The model's bytes are those of a run in which client 2 has no reply in round 2."""
    out, expected = tmp_path / "rows", tmp_path / "expected"
    server, client = APPS
    app = write_app(tmp_path / "app", settings(out), server_app=server, client_app=client)
    run_id = rehearsal.operator.submit(app)
    status = rehearsal.operator.follow(run_id, rehearsal.check)
    assert status == "finished:completed", rehearsal.operator.log(run_id)
    assert replays(rehearsal, 0) == ["same", "another"] * ROUNDS
    assert replays(rehearsal, 1) == replays(rehearsal, 2) == ["old"] * (ROUNDS - 1)

    client_app, server_app = (
        importlib.import_module(f"faulty.{name}").app for name in ("client_app", "server_app")
    )
    config = settings(expected, "2=raise@2")
    grid = LocalGrid(client_app, num_nodes=CLIENTS, run_config=config)
    server_app(grid, Context(1, 0, {}, RecordDict(), config))
    first, second = rows_of(out)
    assert first["reasons"] == {}
    assert second["reasons"] == {"missing": 1}
    assert [row["w"] for row in (first, second)] == [row["w"] for row in rows_of(expected)]

"""A plain Flower app with our strategy, in all of Flower's runtimes."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedsim.deploy.bundle import write_app
from fedsim.deploy.rehearsal import Rehearsal, Simulation, federation_config
from fedsim.engines import LocalGrid
from fedsim.federation.buffered.schedule import LATENESS
from fedsim.privacy import epsilon
from fedsim.privacy.losses import gaussian_epsilon

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"
FEDBUFF = PLUGIN.with_name("fedbuff")
CONFIG = {"num-server-rounds": 5, "population": 10, "noise-multiplier": 1.4}


def load(name, monkeypatch, app=PLUGIN):
    monkeypatch.syspath_prepend(str(app))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def check(path: Path, rounds: int, *, nodes: int = 10, noise: float = 1.4) -> None:
    from fedsim.cohorts import FullCohort

    found = json.loads(path.read_text())
    assert set(found["dtypes"].values()) == {"float64"}
    assert sorted(map(int, found["accuracy"])) == list(range(1, rounds + 1))
    assert found["accuracy"][str(rounds)] > 0.85
    expected = epsilon(
        noise_multiplier=noise, cohort=FullCohort(population=nodes), rounds=rounds, delta=1e-5
    )
    assert found["epsilon"] == pytest.approx(expected)


def test_it_runs_in_one_process(tmp_path, monkeypatch):
    client = load("numpy_app.client_app", monkeypatch).app
    server = load("numpy_app.server_app", monkeypatch).app
    out = tmp_path / "summary.json"
    config = {**CONFIG, "out": str(out)}
    grid = LocalGrid(client, num_nodes=10, run_config=config)
    server(grid, Context(1, 0, {}, RecordDict(), config))
    check(out, 5)


@pytest.mark.slow
def test_it_runs_as_virtual_clients(tmp_path):
    out = tmp_path / "summary.json"
    with Simulation() as simulation:
        run_id = simulation.operator.submit(
            PLUGIN, federation_config=federation_config(10, 1, 0), run_config=f'out="{out}"'
        )
        assert simulation.operator.follow(run_id) == "finished:completed", simulation.operator.log(
            run_id
        )
    check(out, 5)


@pytest.mark.slow
def test_it_runs_as_networked_processes(tmp_path, monkeypatch):
    # Installed on every machine, as an app must be that nodes run; a run brings its config alone.
    apps = ("numpy_app.server_app:app", "numpy_app.client_app:app")
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN), prepend=os.pathsep)
    table = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    out = tmp_path / "summary.json"
    config = {
        **table["config"],
        "out": str(out),
        "num-server-rounds": 3,
        "population": 4,
        "noise-multiplier": 0.3,
    }
    with Rehearsal.temporary(4, apps=apps) as rehearsal:
        rehearsal.start_all()
        server, client = apps
        app = write_app(tmp_path / "app", config, server_app=server, client_app=client)
        run_id = rehearsal.operator.submit(app)
        status = rehearsal.operator.follow(run_id, rehearsal.check)
        assert status == "finished:completed", rehearsal.operator.log(run_id)
    check(out, 3, nodes=4, noise=0.3)


def fedbuff_config(**changes: object) -> dict:
    table = tomllib.loads((FEDBUFF / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    return table["config"] | changes


def test_buffered_rounds_run_in_one_process(tmp_path, monkeypatch, capsys):
    client = load("fedbuff_app.client_app", monkeypatch, FEDBUFF).app
    server = load("fedbuff_app.server_app", monkeypatch, FEDBUFF).app
    config = fedbuff_config(out=str(tmp_path / "summary.json"))
    grid = LocalGrid(client, num_nodes=20, run_config=config)
    server(grid, Context(1, 0, {}, RecordDict(), config))
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["accuracy"] > 0.8
    assert found["epsilon"] == pytest.approx(gaussian_epsilon(3**0.5, 1e-3), rel=1e-6)
    assert LATENESS not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.2, 0.0], ids=["declared seconds", "as they come"])
def test_buffered_rounds_run_as_networked_processes(noise, tmp_path, monkeypatch):
    apps = ("fedbuff_app.server_app:app", "fedbuff_app.client_app:app")
    monkeypatch.setenv("PYTHONPATH", str(FEDBUFF), prepend=os.pathsep)
    out, settings = tmp_path / "summary.json", {"real-time": True, "noise-multiplier": noise}
    config = fedbuff_config(**settings, population=4, concurrency=3, buffer=2, out=str(out))
    config |= {"num-server-rounds": 4, "duration": 10.0 if noise else 1.0}
    with Rehearsal.temporary(4, apps=apps) as rehearsal:
        rehearsal.start_all()
        server, client = apps
        app = write_app(tmp_path / "app", config, server_app=server, client_app=client)
        run_id = rehearsal.operator.submit(app)
        status = rehearsal.operator.follow(run_id, rehearsal.check)
        log = rehearsal.operator.log(run_id)
        assert status == "finished:completed", log
    assert json.loads(out.read_text())["accuracy"] > 0.8
    assert log.count("2 of 2 clients drawn are usable") == 4, log


@contextmanager
def empty_flower_home(directory: Path):
    """The environment of somebody who never ran Flower; the SuperLink it starts is ended."""
    home = directory / "flwr-home"
    home.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = str(Path(sys.executable).parent)
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "PATH": f"{commands}:{os.environ['PATH']}",
    }
    try:
        yield environment
    finally:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = entry.read_bytes().decode().split("\0")
            except OSError:  # it has ended meanwhile
                continue
            if any("flower-superlink" in word for word in command) and str(port) in command:
                os.kill(int(entry.parent.name), signal.SIGTERM)


@pytest.mark.slow
def test_the_readmes_literal_commands_work_on_an_empty_flower_home(tmp_path):
    app = shutil.copytree(PLUGIN, tmp_path / "plugin")
    (commands,) = re.findall(r"```\n(.*?)```", (app / "README.md").read_text(), flags=re.DOTALL)
    with empty_flower_home(tmp_path) as environment:
        ran = subprocess.run(
            ["bash", "-ec", commands],
            cwd=app, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    # `flwr run` exits 0 when a run fails; only the statement at its end shows that it did not.
    (spent,) = re.findall(r"is \(([\d.]+), 1e-05\)-differentially private", output)
    assert float(spent) <= 8
    assert "Traceback" not in output
    assert "No query function" not in output

"""A deployment whose server dies in mid-run, SuperLink, ServerApp and all, as without power."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import fedsim
from fedsim import RunConfig
from fedsim.deploy.federation import CONNECTION, Federation
from fedsim.deploy.operator import Operator
from fedsim.deploy.ports import free_ports
from fedsim.deploy.processes import Processes, StartedProcess, wait_for_port
from fedsim.privacy import Ledger
from fedsim.runs.directory import RUNS, RunDirectory

NODES = 3
CONFIG = RunConfig.parse(
    {
        "name": "served",
        "rounds": 7,
        "partition": {"clients": NODES, "max-examples": 60},
        "client": {"name": "adadp-lr", "batch-size": 10},
        "cohort": {"name": "poisson", "rate": 0.7},
        "mechanism": {"name": "quantile-clipping", "bit-noise": 0.5},
        "noise": {"multiplier": 1.0, "entropy": "config"},
        "server": {"momentum": 0.9},
        "checkpoint": {"every": 2},
        "engine": {"device": "cpu"},
    }
)
BUFFERED = RunConfig.parse(
    {
        **CONFIG.to_tree(),
        "rounds": 5,
        "cohort": {"name": "buffered", "concurrency": 3, "buffer": 2, "participations": 7},
        "mechanism": {"name": "clipping"},
        # Long enough for a busy machine: what is late is a zero, and the bytes are others.
        "devices": {"duration": 30.0},
    }
)
COMMAND = [sys.executable, "-m", "fedsim"]


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, children first."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            parents[int(entry.name)] = int(fields[1])
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family[::-1]


def wait(condition: Callable[[], object], running: StartedProcess, limit: float = 240.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert running.alive(), running.tail(30)
        assert time.monotonic() < deadline, running.tail(30)
        time.sleep(0.1)


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    port, fleet_port = free_ports(2)
    return Federation.create(tmp_path / "fed", nodes=NODES, port=port, fleet_port=fleet_port)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield stack.enter_context(Processes(tmp_path / "logs"))


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, BUFFERED], ids=["synchronous", "buffered"])
def test_a_run_whose_server_died_goes_on_by_one_command_to_the_same_bytes(
    config: RunConfig, federation: Federation, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(config.to_toml())

    def server() -> StartedProcess:
        command = [*COMMAND, "deploy", "superlink", str(federation.superlink)]
        running = processes.start("server", command, {RUNS: str(federation.runs)})
        wait_for_port(running, federation.port)
        return running

    def submit(name: str, *options: str) -> StartedProcess:
        here = [
            "--set",
            "engine.name=deployment",
            "--set",
            f"engine.federation={federation.directory}",
        ]
        toml, out = str(tmp_path / "run.toml"), str(tmp_path / "run")
        return processes.start(name, [*COMMAND, "run", toml, *here, "--out", out, *options])

    def rows() -> int:
        files = list(federation.runs.glob("served-*/metrics.csv"))
        return len(RunDirectory(files[0].parent).metrics_file.rows()) if files else 0

    first = server()
    keys = [federation.public_key(node) for node in range(NODES)]
    Operator(federation.operator, CONNECTION).register(keys)
    for node, port in enumerate(free_ports(NODES)):
        directory = str(federation.node(node))
        processes.start(
            f"node-{node}", [*COMMAND, "deploy", "node", directory, "--port", str(port)]
        )

    begun = submit("begun")
    wait(lambda: rows() >= config.rounds - 2, begun)
    for pid in descendants(first.pid):
        os.kill(pid, signal.SIGKILL)
    first.process.wait()
    assert begun.process.wait(240) == 1
    assert "--resume" in begun.tail()

    server()
    resumed = submit("resumed", "--resume")
    assert resumed.process.wait(400) == 0, resumed.tail(40)
    assert len(list(federation.runs.iterdir())) == 1
    fedsim.run(config, out=tmp_path / "whole")
    left, whole = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "whole")
    assert left.model.read_bytes() == whole.model.read_bytes()
    ledgers = [Ledger.read(run.ledger, delta=1e-5) for run in (left, whole)]
    assert ledgers[0].heads[-1] == ledgers[1].heads[-1]
    assert [row["epsilon"] for row in left.metrics_file.rows()[1:]] == [
        row["epsilon"] for row in whole.metrics_file.rows()[1:]
    ]

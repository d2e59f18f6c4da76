"""`python -m benchmarks.federation`: a round of ten real SuperNodes on this machine.

A whole federation (SuperLink, ten SuperNodes, TLS, keys) is started on loopback, with a relay in
front of the SuperLink's port for nodes that counts bytes. Printed are seconds per round, CPU
seconds of all processes, and bytes per client and round each way, compared with one copy of the
parameters in float32. The first round, which waits for nodes to join, is left out.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from fedsim.config import RunConfig
from fedsim.deploy.bundle import write_app
from fedsim.deploy.ports import free_ports
from fedsim.deploy.rehearsal import Rehearsal
from fedsim.deploy.services import Node
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.channel import CallbackServer
from fedsim.runs.directory import OUT, RunDirectory
from fedsim.runs.preflight import check
from fedsim.runs.resolve import resolve

MAX_SECONDS = 4.0
"""Aim for a round of ten nodes on two cores of an idle machine."""

MODELS = {"softmax": {"name": "softmax"}, "mlp": {"name": "mlp", "widths": "1344"}}


@dataclass(frozen=True)
class Federated:
    """Cost of a round: medians of the rounds' times, and means of their bytes.

    Attributes
    ----------
    nodes, parameters : int
    seconds, cpu_seconds : float
    down, up : float
        Bytes from the SuperLink to a node, and back.
    """

    nodes: int
    parameters: int
    seconds: float
    cpu_seconds: float
    down: float
    up: float

    def line(self) -> str:
        """The cost as one line of text."""
        copy = 4 * self.parameters
        return (
            f"{self.nodes} nodes, {self.parameters:,} parameters: {self.seconds:.2f} s a round "
            f"(at most {MAX_SECONDS:g}), {self.cpu_seconds:.2f} CPU s; bytes a client "
            f"{self.down:,.0f} down, {self.up:,.0f} up, {copy:,} in one copy of float32"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    for model in options.models:
        print(measured(model, options.rounds, options.nodes).line(), flush=True)


def measured(model: str, rounds: int, nodes: int) -> Federated:
    """Cost of a run's rounds, on a federation of its own."""
    config = RunConfig.parse(
        {
            "rounds": rounds,
            "partition": {"clients": nodes},
            "model": MODELS[model],
            "client": {"batch-size": 10},
            "mechanism": {"name": "clipping"},
            "noise": {"multiplier": 1.0},
            "evaluate": {"every": 1},
            "engine": {"name": "deployment", "device": "cpu"},
        }
    )
    resolved = resolve(config)
    check(resolved)
    with tempfile.TemporaryDirectory() as place:
        out = RunDirectory(Path(place) / "out")
        relay = Relay()
        watch = Watch(relay, nodes)
        with (
            out.claim(resolved.config.to_toml()),
            CallbackServer([watch]) as server,
            Rehearsal.temporary(
                nodes, variables={OUT: str(out.path), **server.variables}
            ) as rehearsal,
        ):
            relay.start(rehearsal.federation.fleet_port)
            for number in range(nodes):
                node = Node.load(rehearsal.federation.node(number))
                replace(node, superlink=f"127.0.0.1:{relay.port}").save({"files": ["/"]})
            rehearsal.start_all()
            app = write_app(Path(place) / "app", resolved.config.to_tree())
            operator = rehearsal.operator
            run_id = operator.submit(app)
            status = operator.follow(run_id, rehearsal.check)
            if status != "finished:completed":
                raise SystemExit(f"the run ended with {status}:\n{operator.log(run_id)}")
    count = sum(int(np.prod(array.shape)) for array in resolved.initial_arrays.values())
    return watch.summed(count)


class Relay:
    """Forwards connections from a port of its own to another, and counts the bytes each way."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.up = self.down = 0
        self._lock = threading.Lock()

    def start(self, port: int) -> None:
        """Listen, and forward connections to ``port``."""
        listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            node, _ = listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", port))
            except OSError:  # the SuperLink has ended
                node.close()
                continue
            for source, sink, direction in ((node, server, "up"), (server, node, "down")):
                threading.Thread(
                    target=self._pass, args=(source, sink, direction), daemon=True
                ).start()

    def _pass(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._lock:
                    setattr(self, direction, getattr(self, direction) + len(data))
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one side has closed the connection


@dataclass
class Watch(Callback):
    """Records clocks and byte counters at the end of each round."""

    relay: Relay
    nodes: int
    noted: list[tuple[float, float, int, int]] = field(default_factory=list)
    usable: list[float] = field(default_factory=list)

    def on_round(self, status: RunStatus) -> None:
        if status.round:
            counters = cpu_of_family(), self.relay.down, self.relay.up
            self.noted.append((time.perf_counter(), *counters))
            self.usable.append(status.row["usable"])

    def summed(self, parameters: int) -> Federated:
        """Cost of the rounds after the first one."""
        if set(self.usable) != {self.nodes}:
            print(f"Not all {self.nodes} nodes were there in every round: {self.usable}.")
        steps = np.diff(np.array(self.noted), axis=0)
        seconds, cpu = (statistics.median(steps[:, column].tolist()) for column in (0, 1))
        down, up = (float(steps[:, column].mean()) / self.nodes for column in (2, 3))
        return Federated(self.nodes, parameters, seconds, cpu, down, up)


def cpu_of_family() -> float:
    """CPU seconds of this process and all its descendants, including ended ones."""
    ticks, parents = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(name)] = int(fields[1])
        ticks[int(name)] = sum(map(int, fields[11:15]))
    family, new = set(), {os.getpid()}
    while new:
        family |= new
        new = {pid for pid, parent in parents.items() if parent in family} - family
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

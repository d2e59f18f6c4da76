"""Cost of each engine: start-up, seconds per round, memory per process, bytes on the wire.

    python -m benchmarks.engines                       # all that this machine can do
    python -m benchmarks.engines --engines local ray --clients 10 100

Every measurement is a process of its own. Clients have ten examples of 784 features and take
one step; all of them take part in every round. The first round counts as part of the start-up; the
seconds per round are the median of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from flwr.app import ArrayRecord

RESULTS = Path(__file__).with_name("results") / "engines.md"
MODELS = {"8k": {"name": "softmax"}, "1M": {"name": "mlp", "widths": "1258"}}
# Most clients: a SuperNode is two processes, and one more for every message.
MOST = {"deployment": 10}
HEAD = ["engine", "parameters", "clients", "start-up s", "s a round", "largest process MB",
        "processes", "bytes a client and round"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    engines = ["local", "ray", "simulation", "deployment"]
    parser.add_argument("--engines", nargs="+", default=engines, choices=engines)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=3, metavar=("ENGINE", "MODEL", "CLIENTS"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.one:
        engine, model, clients = options.one
        print(json.dumps(measure(engine, model, int(clients), options.rounds)))
        return
    rows = []
    for engine in options.engines:
        for model in options.models:
            for clients in options.clients:
                if clients <= MOST.get(engine, clients):
                    rows.append(run_one(engine, model, clients, options.rounds))
                    print(line(rows[-1]), flush=True)
    write(options.out, rows)


def run_one(engine: str, model: str, clients: int, rounds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.engines", "--rounds", str(rounds)]
    done = subprocess.run(
        [*command, "--one", engine, model, str(clients)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"},
    )
    if done.returncode:
        sys.exit(done.stderr)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measure(engine: str, model: str, clients: int, rounds: int) -> dict[str, Any]:
    import fedsim

    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data.npz"
        random = np.random.default_rng(0)
        x = random.normal(size=(10 * clients, 784)).astype(np.float32)
        y = random.integers(0, 10, 10 * clients)
        y[:10] = np.arange(10)
        np.savez(data, x_train=x, y_train=y, x_test=x[:10], y_test=np.arange(10))
        config = fedsim.RunConfig.parse(
            {
                "rounds": rounds,
                "data": {"name": str(data)},
                "partition": {"clients": clients},
                "model": MODELS[model],
                "client": {"batch-size": 10},
                "mechanism": {"name": "clipping"},
                "noise": {"multiplier": 1.0},
                "evaluate": {"every": 0},
                "engine": {"name": engine, "device": "cpu"},
            }
        )
        memory = Memory()
        with memory:
            start = time.perf_counter()
            result = fedsim.run(config, out=Path(place) / "out")
        total = time.perf_counter() - start
    seconds = [row["seconds"] for row in result.metrics if row["round"] > 1]
    parameters = sum(int(np.prod(a.shape)) for a in result.arrays.values())
    return {
        "engine": engine,
        "parameters": parameters,
        "clients": clients,
        "start-up s": total - sum(seconds),
        "s a round": statistics.median(seconds),
        "largest process MB": memory.largest / 1e6,
        "processes": memory.processes,
        "bytes a client and round": 0 if engine in ("local", "ray") else wire_bytes(result.arrays),
    }


def wire_bytes(arrays: ArrayRecord) -> int:
    """Bytes that Flower sends for one client: the model to it, and its parameters back."""
    from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from fedsim.federation.flower_internals import ensure_identity

    ensure_identity(1)
    config = ConfigRecord({"server-round": 1})
    metrics = MetricRecord({"num-examples": 10, "loss": 1.0})
    instruction = Message(RecordDict({"arrays": arrays, "config": config}), 2, "train")
    reply = Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=instruction)
    return sum(
        len(nested.deflate())
        for message in (instruction, reply)
        for nested in get_all_nested_objects(message).values()
    )


class Memory(threading.Thread):
    """Watches this process and its descendants: their number, and the memory of the largest."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest = self.processes = 0
        self._over = threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.25):
            table = processes()
            family, new = set(), {os.getpid()}
            while new:
                family |= new
                new = {p for p, (parent, _) in table.items() if parent in family} - family
            self.processes = max(self.processes, len(family & set(table)))
            self.largest = max(self.largest, *(table[p][1] for p in family if p in table))


def processes() -> dict[int, tuple[int, int]]:
    """Parent and resident bytes of every process."""
    page = os.sysconf("SC_PAGE_SIZE")
    table = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        table[int(name)] = (int(fields[1]), int(fields[21]) * page)
    return table


def line(row: dict[str, Any]) -> str:
    shown = [_digits(row[key]) if isinstance(row[key], float) else f"{row[key]:,}"
             if isinstance(row[key], int) else row[key] for key in HEAD]  # fmt: skip
    return f"| {' | '.join(shown)} |"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    import flwr  # noqa: F401 - its version is what the numbers belong to
    import torch

    from fedsim.deploy.flower_replacements import flower_version

    version = ".".join(map(str, flower_version()))
    load = os.getloadavg()[0]
    head = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    text = (
        "# What each engine costs\n\n"
        f"`python -m benchmarks.engines`, {time.strftime('%Y-%m-%d')}: {os.cpu_count()} cores "
        f"({platform.machine()}), load average {load:.1f}, Python {platform.python_version()}, "
        f"flwr {version}, torch {torch.__version__}.\n\n"
        + "\n".join([*head, *map(line, rows)])
        + "\n"
    )
    out.parent.mkdir(exist_ok=True)
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
